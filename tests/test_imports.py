"""What an import may cost: the torch-free floors load no torch, and `import octavo` loads next to nothing."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

TORCH_FREE = ["core", "cache", "schedule", "engine", "text", "server", "hub", "native", "cli", "bench", "simulate"]
HEAVY = {"torch", "transformers"}


def modules_of(package: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None, package
    found = pkgutil.walk_packages(spec.submodule_search_locations, prefix=f"{package}.")
    return [package, *(module.name for module in found)]


def loaded_after(code: str) -> set[str]:
    """Top-level names and octavo's modules in sys.modules of a fresh interpreter that ran `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("floor", TORCH_FREE)
def test_a_torch_free_floor_loads_no_torch(floor: str) -> None:
    modules = [name for name in modules_of(f"octavo.{floor}") if not name.endswith("__main__")]
    loaded = loaded_after("import " + ", ".join(modules))
    assert set(modules) <= loaded
    assert not HEAVY & loaded


def test_the_engine_halves_of_features_load_no_torch() -> None:
    """Nor does building them, without processors of one's own, which may need it."""
    code = (
        "import dataclasses\n"
        "from octavo.features import FeatureContext, build_engine_halves, payload_types, settings_types\n"
        "on = lambda kind: kind(**{f.name: True for f in dataclasses.fields(kind) if f.type == 'bool'})\n"
        "chosen = {name: on(kind) for name, kind in settings_types().items()}\n"
        "made = FeatureContext(vocab_size=9, eos_token_ids=(1,), load_tokenizer=None, settings=chosen)\n"
        "assert len(payload_types()) >= len(build_engine_halves(made)) > 0"
    )
    assert not HEAVY & loaded_after(code)


def test_the_check_would_see_torch() -> None:
    assert "torch" in loaded_after("import torch")


def test_import_octavo_is_lean() -> None:
    loaded = loaded_after("import octavo; octavo.__version__")
    ours = {name for name in loaded if name.split(".")[0] == "octavo"}
    assert ours == {"octavo", "octavo.version"}
    assert not {"torch", "numpy", "fastapi", "msgspec", "rich", "httpx"} & loaded


def test_sampling_params_need_no_torch() -> None:
    loaded = loaded_after("from octavo import SamplingParams, RequestOutput; SamplingParams(temperature=0)")
    assert not HEAVY & loaded


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_command_line_answers_without_loading_anything_heavy(argument: str) -> None:
    code = (
        "import contextlib, io\nfrom octavo.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    main([{argument!r}])\n"
    )
    loaded = loaded_after(code)
    assert "octavo.cli.main" in loaded
    assert not {"torch", "numpy", "fastapi", "msgspec", "rich", "httpx", "yaml"} & loaded


def test_unknown_names_are_refused() -> None:
    import octavo

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = octavo.LMM
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput"} <= set(dir(octavo))
