"""Every format that checkpoints have, as kernels keep it: products of any number of rows, and of the parts of ranks,
against the values that the format's specification gives, in float64."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf_kit import random_rows
from quantized_kit import EXAMPLES
from torch import Tensor

from octavo.models.load.gguf_blocks import CODES, INTEGERS, as_blocks
from octavo.models.load.quantized.table import dequantizing
from octavo.models.load.tensors import TensorCheckpoint
from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.packed import emit_rounded, packed
from octavo.nn.weights import Index, QuantizedBlocks

from test_native_ops import run  # isort: skip

ROWS = (1, 2, 7, 16, 33, 64, 257)
OUTPUTS = 48
WIDTHS = {"gptq-4-v2": 320, "awq-gemv": 320, "w8a16": 320, "bnb-nf4": 320, "bnb-fp4-nested": 320, "fp8-tiles": 640}
"""Inputs: an odd number of groups, 5; of other formats than these, 160."""
KINDS = sorted(CODES.keys() | INTEGERS.keys())
KEPT = [name for name, example in EXAMPLES.items() if example.packs or example.codes]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2)


def stored(name: str) -> tuple[QuantizedBlocks, Tensor]:
    """An example of a format as kernels keep it, and its values."""
    torch.manual_seed(len(name))
    example = EXAMPLES[name]
    tensors, exact = example.write(torch.randn(OUTPUTS, WIDTHS.get(name, 160)))
    checkpoint = TensorCheckpoint({f"a.{suffix}": tensor for suffix, tensor in tensors.items()})
    blocks = dequantizing(checkpoint, {"quantization_config": example.settings}).blocks("a.weight", codes=True)
    assert blocks is not None
    return blocks, exact


def stored_by_gguf(kind: Kind) -> tuple[QuantizedBlocks, Tensor]:
    """A random matrix in a format of GGUF, as kernels keep it, and gguf-py's values of it."""
    raw = random_rows(kind, (OUTPUTS, 5 * quants.GGML_QUANT_SIZES[kind][0]))
    blocks = as_blocks(torch.from_numpy(raw), kind)
    assert blocks is not None
    return blocks, torch.from_numpy(quants.dequantize(raw, kind)).double()


def product(pool: Pool, x: Tensor, blocks: QuantizedBlocks) -> Tensor:
    """x [T, K] in the dtype of the model's activations, which the kernels round as those of a step."""
    scheme = BlockQuantized(x.dtype, torch.device("cpu"))
    scheme.prepare([{"weight": blocks}])
    assert scheme.weight is None, "the matrix is not expanded"
    matrix = packed(scheme)
    rows = x.float()
    b = ProgramBuilder.make(rows.shape[1] * 4, OUTPUTS * 4, planes=2)
    b.wide = Dtype.BFLOAT if x.dtype == torch.bfloat16 else Dtype.FLOAT
    matrix.emit(b, emit_rounded(b, matrix, 0, Dtype.FLOAT), 1)
    return run(pool, b, rows, torch.zeros(len(x), OUTPUTS))[:, : matrix.rows]


def check(pool: Pool, blocks: QuantizedBlocks, exact: Tensor, dtype: torch.dtype, rows: tuple[int, ...] = ROWS) -> None:
    for count in rows:
        x = torch.randn(count, exact.shape[1]).to(dtype)
        expected = x.double() @ exact.T
        assert (product(pool, x, blocks) - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", KEPT)
def test_any_number_of_rows(name: str, dtype: torch.dtype, pool: Pool) -> None:
    blocks, exact = stored(name)
    groups = blocks.values.shape[1] // 32 if blocks.book is None else blocks.scales.shape[1]
    assert groups % 5 == 0 or groups == 1
    check(pool, blocks, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_number_of_rows_of_a_gguf(kind: Kind, dtype: torch.dtype, pool: Pool) -> None:
    check(pool, *stored_by_gguf(kind), dtype)


def parts_of_ranks(blocks: QuantizedBlocks) -> list[Index]:
    """Half of the outputs, and the inputs of two ranks, each in whole groups and in order."""
    rows, columns = blocks.values.shape
    groups = blocks.scales.shape[1]
    size = max(columns // groups, 32) if groups > 1 else 32
    cut = columns // size // 2 * size
    parts = [(slice(rows // 2, rows), slice(0, columns))]
    if blocks.order is None:
        parts += [(slice(0, rows), slice(0, cut)), (slice(0, rows), slice(cut, columns))]
    return parts


@pytest.mark.parametrize("name", KEPT)
def test_parts_of_ranks(name: str, pool: Pool) -> None:
    blocks, exact = stored(name)
    for part in parts_of_ranks(blocks):
        check(pool, blocks.part(part), exact[part], torch.float32, (1, 33))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_parts_of_ranks_of_a_gguf(kind: Kind, pool: Pool) -> None:
    blocks, exact = stored_by_gguf(kind)
    for part in parts_of_ranks(blocks):
        check(pool, blocks.part(part), exact[part], torch.float32, (1, 33))
