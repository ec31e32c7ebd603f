"""Write the table of architectures in docs/models.md from the registry and the configurations that the tests run.

python tools/models_table.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(sys.path[0], "tests")))
from bridge_kit import OTHERS, OWN
from tiny import FAMILIES, class_of, config_of
from tiny_families import DENSE, HYBRID, HYBRID_MOE, MOE

from octavo.hub.gguf_families import FAMILIES as GGUF
from octavo.models.native import reason_against
from octavo.models.registry import ARCHITECTURES, spec_of

BEGIN = "<!-- table: python tools/models_table.py -->"
END = "<!-- end of table -->"
DOCS = Path(__file__).resolve().parent.parent / "docs" / "models.md"
NOT_IN_TRANSFORMERS = {
    "ExaoneForCausalLM": "Llama's",
    "InternLM2ForCausalLM": "Llama's",
    "IQuestCoderForCausalLM": "Llama's",
    "InternLM3ForCausalLM": "Llama's",
    "MiMoForCausalLM": "Qwen2's",
    "MiniCPMForCausalLM": "Granite's",
    "QWenLMHeadModel": "Qwen2's",
}
"""Architecture -> whose weights `tests/golden/test_renamed_families.py` gives it."""


STORED_ALIKE = {
    "DeepseekV3ForCausalLM",
    "FalconMambaForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "InternLM3ForCausalLM",
    "MixtralForCausalLM",
    "Olmo3ForCausalLM",
    "SolarOpenForCausalLM",
}
"""Architectures that GGUF files hold under the name of another."""


def rows() -> Iterator[str]:
    tested, bridged = (
        dict(_configurations()),
        {_architecture(getattr(transformers, kind)) for kind, _ in (OTHERS | OWN).values()},
    )
    in_gguf = {family.name for family in GGUF.values()} | STORED_ALIKE
    for name, family in sorted(ARCHITECTURES.items(), key=lambda pair: pair[0].lower()):
        about = " ".join((family.__doc__ or "").partition("\n\n")[0].split()).rstrip(".").replace("|", "\\|")
        rest = f"{'yes' if name in in_gguf else ''} | {'yes' if name in bridged else ''}"
        alike = (other for other in tested if ARCHITECTURES[other] is family)
        same = name if name in tested else next(alike, name)
        if same not in tested:
            yield f"| `{name}` | {about} | as {NOT_IN_TRANSFORMERS[name]} | yes | yes | {rest} |"
            continue
        spec = spec_of(tested[same])
        reason = reason_against(spec)
        program = "yes" if reason is None else f"no: {reason.removeprefix('the kernels lack ')}"
        yield f"| `{name}` | {about} | {program} | yes | yes | {rest} |"
    for name in sorted(bridged - ARCHITECTURES.keys()):
        yield f"| `{name}` | no implementation of Octavo's own | no | yes | yes |  | yes |"


def table() -> str:
    header = [
        "| architecture | models | CPU program | CPU, torch | GPU | GGUF | through transformers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*header, *rows()])


def _configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the architecture and configuration of every tiny checkpoint that the tests compare with Transformers."""
    for name in (*DENSE, *HYBRID, *HYBRID_MOE, *MOE, *FAMILIES)[::-1]:
        config = config_of(name)
        architecture = class_of(config).__name__
        yield architecture, {**config.to_dict(), "architectures": [architecture]}


def _architecture(kind: Any) -> str:
    """Return the architecture of a class of configurations."""
    name: str = transformers.AutoModelForCausalLM._model_mapping[kind].__name__
    return name


def rewrite(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
