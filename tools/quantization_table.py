"""Write the table of support in docs/quantization.md from the examples of quantized weights that the tests run.

A format has a cell if it is among the parameters of the column's test.

    python tools/quantization_table.py [FILE]
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.extend(str(Path(sys.path[0], "tests", folder)) for folder in ("", "golden", "oracle"))
import test_quantized_support
from gguf_kit import random_rows
from quantized_kit import EXAMPLES

from octavo.models.load.gguf_blocks import CODES, INTEGERS, SUPPORTED, as_blocks
from octavo.models.load.quantized.table import dequantizing, rounds_activations
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.gpu_packed_experts import ExpertMatrices
from octavo.nn.quant.packed import packed
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.weights import QuantizedBlocks

BEGIN = "<!-- table: python tools/quantization_table.py -->"
END = "<!-- end of table -->"
DOCS = Path(__file__).resolve().parent.parent / "docs" / "quantization.md"
ROWS, COLUMNS = 32, 512
_HALVES = (
    (slice(0, ROWS // 2), slice(0, COLUMNS)),
    (slice(0, ROWS), slice(COLUMNS // 2, COLUMNS)),
)
"""Parts of ranks: of a layer divided by outputs, and of one divided by inputs."""


FORM = ExpertsForm(num_experts=1, hidden_size=COLUMNS, size=ROWS)


def rows() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each format's method, its name, and its cells."""
    for name, example in EXAMPLES.items():
        torch.manual_seed(0)
        stored, _ = example.write(torch.randn(ROWS, COLUMNS))
        tensors = {f"a.{suffix}": tensor for suffix, tensor in stored.items()}
        view = dequantizing(TensorCheckpoint(tensors), {"quantization_config": example.settings})
        rounds = rounds_activations({"quantization_config": example.settings})
        cells = _cells(name, view.blocks("a.weight", codes=True), rounds=rounds)
        yield example.settings["quant_method"], f"`{name}`", cells
    for kind in sorted(SUPPORTED & (CODES.keys() | INTEGERS.keys())):
        made = as_blocks(torch.from_numpy(random_rows(kind, (ROWS, COLUMNS))), kind)
        yield "GGUF", kind.name, _cells(kind.name, made, rounds=False)


def _cells(name: str, cpu: QuantizedBlocks | None, *, rounds: bool) -> tuple[str, ...]:
    on_gpu = None if cpu is None else _form_on_gpu(cpu, rounds=rounds)
    gpu = None if on_gpu is None else cpu
    kept = ["expanded" if blocks is None else "packed" for blocks in (cpu, gpu)]
    takes = BlockQuantized(torch.float32, torch.device("cpu")).experts(FORM).takes_blocks
    experts = [kept[0] if takes else "expanded", _of_experts_on_gpu(cpu, rounds=rounds)]
    beside = {"test_ranks_on_cpus": [_of_ranks(cpu), _of_ranks(gpu)], "test_experts": experts, "test_adapters": kept}
    cells = (" / ".join(forms) if name in tested(test) else "" for test, forms in beside.items())
    return _form(cpu), on_gpu or "expanded", *cells


def _form_on_gpu(blocks: QuantizedBlocks, *, rounds: bool) -> str | None:
    scheme = PackedOnGpu(torch.bfloat16, torch.device("cpu"), rounds=rounds)
    scheme.prepare([{"weight": blocks}])
    return scheme.packed_as


def _of_experts_on_gpu(blocks: QuantizedBlocks | None, *, rounds: bool) -> str:
    if blocks is None:
        return "expanded"
    product = ExpertMatrices(1, torch.bfloat16, torch.device("cpu"), None, rounds=rounds)
    product.take(0, [{"weight": blocks}])
    return "expanded" if product.packed_as is None else "packed"


def _of_ranks(blocks: QuantizedBlocks | None) -> str:
    if blocks is None or not blocks.divides(_HALVES[0]):
        return "expanded"
    return "packed" if blocks.divides(_HALVES[1]) else "packed by outputs"


@functools.cache
def tested(test: str) -> frozenset[str]:
    """Return the formats that are parameters of a test in tests/golden/test_quantized_support.py."""
    marks = getattr(test_quantized_support, test).pytestmark
    (values,) = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    return frozenset(value if isinstance(value, str) else value.values[0] for value in values)


def _form(blocks: QuantizedBlocks | None) -> str:
    if blocks is None:
        return "expanded"
    scheme = BlockQuantized(torch.float32, torch.device("cpu"))
    scheme.prepare([{"weight": blocks}])
    return packed(scheme).form


def table() -> str:
    grouped: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for method, name, forms in rows():
        grouped[method, forms].append(name)
    header = [
        "| method | tested formats | on a CPU | on a GPU | ranks | experts | adapters |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines = (
        f"| {method} | {', '.join(names)} | {' | '.join(forms)} |"
        for (method, forms), names in sorted(grouped.items(), key=lambda item: item[0][0].lower())
    )
    return "\n".join([*header, *lines])


def rewrite(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
