"""How the CUDA kernels widen codes, compiled for the CPU: each thread gets the numbers of its operands, exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from quantized_kit import codes_of
from torch import Tensor

from octavo.nn.ops import fragments, nvrtc
from octavo.nn.quant.coded_fragments import pack_coded

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
CPU = torch.device("cpu")
PROBE = """
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
probe(const uint4* words, const void* book, u32* to) {
  const Planes table = planes_of(book, HALF);
  for (int r = 0; r < 4; r++) numbers_of<HALF>(words + threadIdx.x * WORDS, r, table, to + threadIdx.x * 16 + r * 4);
}
"""
OF_HEADER = {"WARPS": 4, "DEPTH": 2, "ADDED": 0, "OUT_FLOAT": 0, "FORM": 4}
MOVED = 2.0**-120
"""A number of E4M3 in bfloat16, divided by the number."""


def all_codes(kind: str) -> Tensor:
    """All pairs of places in a table, or each finite E4M3 in each place of a pair, in a matrix of 64 x 64."""
    i = torch.arange(64 * 32)
    if kind == "table":
        return torch.stack([i % 16, i // 16 % 16], 1).view(64, 64).to(torch.uint8)
    codes = (torch.stack([i + i // 1024 * 4, i + i // 256], 1) % 256).view(64, 64).to(torch.uint8)
    return codes.where(codes & 127 != 127, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "table"])
def test_threads_widen_the_values_of_their_operands(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As the instruction mma.m16n8k16 of PTX defines them."""
    blocks = codes_of(kind, 64, 64, 64)
    blocks.values.copy_(all_codes(kind))
    matrix = pack_coded([blocks], CPU)
    assert matrix is not None
    macros = fragments.macros_of(fragments.form_of(matrix), dtype) | OF_HEADER
    source = nvrtc.source_of("integers.cuh", "codes.cuh") + PROBE
    library = cuda_on_cpu.compiled(source, "probe", macros, tmp_path)
    words = matrix.codes[0, 0].transpose(0, 1).contiguous()
    book = torch.zeros(0) if matrix.book is None else matrix.book
    found = torch.zeros(4, 8, 4, 4, 2, 2, 2, dtype=dtype)  # warp, a, b; operand, upper inputs, upper outputs, second
    cuda_on_cpu.launch(library, [words, book, found], [], [], (1, 1, 1), 0, late=False)
    assert blocks.book is not None
    numbers = blocks.book.of(blocks.values).double()
    if kind == "table":
        numbers = numbers.to(dtype).double()
    elif dtype == torch.bfloat16:
        numbers *= MOVED
    by_place = found.permute(0, 5, 1, 3, 4, 2, 6).reshape(64, 64)
    assert torch.equal(by_place.double(), numbers)
