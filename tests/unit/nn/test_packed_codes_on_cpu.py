"""How the CUDA kernel of packed experts widens codes, compiled for the CPU: which thread loads, scales and passes what
to the matrix units. Tests of the kernel are in oracle/test_packed_experts.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from quantized_kit import BNB_TABLES
from torch import Tensor

from octavo.nn.ops import nvrtc, packed_expert_tiles
from octavo.nn.ops.expert_weights import PackedMatrices
from octavo.nn.ops.packed_expert_tiles import Form
from octavo.nn.ops.tables import book_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")

CPU = torch.device("cpu")
HALF, BRAIN, WIDE = torch.float16, torch.bfloat16, torch.float32
WORDS, BYTES = torch.int16, torch.int8
# Dtypes of codes, scales and values; kind, codes of a block, group, minima; the first product; height of a tile.
FORMS: dict[str, tuple[Any, ...]] = {
    "integers, whole columns": (WORDS, HALF, BRAIN, "integers", 64, 0, False, True, 16),
    "integers, groups of 16, minima": (WORDS, HALF, BRAIN, "integers", 16, 16, True, False, 64),
    "integers, groups of 64": (WORDS, HALF, HALF, "integers", 32, 64, False, True, 128),
    "E2M1": (WORDS, BRAIN, BRAIN, "e2m1", 32, 32, False, True, 128),
    "E2M1 in float16": (WORDS, HALF, HALF, "e2m1", 16, 16, False, False, 16),
    "a table": (WORDS, HALF, BRAIN, "table", 16, 64, False, True, 32),
    "a table in blocks": (WORDS, WIDE, BRAIN, "table", 64, 256, False, False, 128),
    "INT8, groups of 32, minima": (BYTES, HALF, BRAIN, "integers", 1, 32, True, True, 16),
    "E4M3": (torch.float8_e4m3fn, WIDE, BRAIN, "integers", 1, 128, False, False, 128),
    "E4M3 in float16": (torch.float8_e4m3fn, HALF, HALF, "integers", 1, 16, False, True, 16),
    "E5M2": (torch.float8_e5m2, WIDE, BRAIN, "integers", 1, 64, False, True, 64),
}
OFTEN = ("integers, groups of 16, minima", "E2M1", "a table", "E4M3")

PROBE = """
extern "C" __global__ void
probe(const unsigned char* stage, const void* book, u32* out, int size) {
  for (int i = threadIdx.x; i < size; i += 128 * GROUPS) emulated_shared[i] = stage[i];
  __syncthreads();
  const int thread = threadIdx.x & 127, group = threadIdx.x / 128, warp = thread / 32, lane = thread % 32;
  const int output = first_output(group, warp, lane / 4);
  const u32 rows = output * ROW_BYTES + (BITS == 4 ? 4 : 2) * (lane % 4);
  const u32 factors = 2 * HALF_TILE * ROW_BYTES + output * SCALE_BYTES;
  const Planes table = planes_of(book, HALF);
  u32* const to = out + threadIdx.x * (UNITS * 16);
  widen<0>(rows, lane / 4 << 4, factors, table, to), widen<1>(rows, lane / 4 << 4, factors, table, to + 16);
#if UNITS > 2
  widen<2>(rows, lane / 4 << 4, factors, table, to + 32), widen<3>(rows, lane / 4 << 4, factors, table, to + 48);
#endif
}
"""
INSTRUCTIONS = """
inline u32 fma2(u32 a, u32 b, u32 c) {
  const float2 x = wide2(a), y = wide2(b), z = wide2(c);
  return narrow2(x.x * y.x + z.x, x.y * y.y + z.y);
}
inline u32 add2(u32 a, u32 b) { return fma2(a, HALF ? 0x3C003C00 : 0x3F803F80, b); }
inline u32 mul2(u32 a, u32 b) { return fma2(a, b, 0); }
inline u32 nibbles(u32 w) { return (w & 0x000F000F) | (HALF ? 0x64006400 : 0x43004300); }
template <int P>
inline u32 pair(const uint4* words, int) {
  const u32 w = words->x;
  return narrow2((signed char)w, (signed char)(w >> 16));
}
inline u32 load32(u32 from) { u32 v; memcpy(&v, emulated_shared + from, 4); return v; }
inline u32 load16(u32 from) { unsigned short v; memcpy(&v, emulated_shared + from, 2); return v; }
"""


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
def test_widening(name: str, tmp_path: Path) -> None:
    stored, scales, dtype, kind, field, group, minima, first, height = FORMS[name]
    form = Form(first, height, dtype, stored, field, kind, group, minima, scales, False, False, 2)
    _, macros, _ = packed_expert_tiles.source_of(form)
    outputs, inputs = 64 * macros["GROUPS"], 256 if stored == WORDS else 128
    matrices = random_matrices(form, outputs, inputs)
    source = INSTRUCTIONS + nvrtc.source_of("integers.cuh", "codes.cuh", "packed_numbers.cuh", "packed_codes.cuh")
    unused = {"FORM": 3, "DEPTH": 1, "ADDED": 0, "OUT_FLOAT": 0, "WARPS": 4 * macros["GROUPS"]}
    library = cuda_on_cpu.compiled(source + PROBE, "probe", {**macros, **unused}, tmp_path)
    got = torch.zeros(128 * macros["GROUPS"], inputs // 64, 16, dtype=torch.int32)
    memory = stage_of(matrices)
    book = got if matrices.book is None else matrices.book
    cuda_on_cpu.launch(library, [memory, book, got], [], [len(memory)], (1, 1, 1), len(memory), late=False)
    values = matrices.values(0) if group else matrices.values(0) / matrices.scales[0].float().T
    expected = passed_to_units(values, first=first, dtype=dtype)
    limit = 2.0**-6 if dtype == BRAIN else 2.0**-9  # numbers, scales, minima and results are rounded
    error = (got.view(dtype).float() - expected).abs()
    assert bool((error <= limit * expected.abs().clamp_min(expected.abs().mean())).all()), float(error.max())


def random_matrices(form: Form, outputs: int, inputs: int) -> PackedMatrices:
    random = torch.Generator().manual_seed(outputs)
    width = inputs // (4 if form.codes == WORDS else 1)
    codes = torch.randint(-(2**15), 2**15, (1, outputs, width), generator=random).to(torch.int16)
    if form.codes != WORDS:
        codes = codes.to(torch.uint8) & 0xF7  # no infinities
    group = form.group or inputs
    scales = (torch.rand(1, inputs // group, outputs, generator=random) + 0.5).to(form.scales)
    minima = (torch.rand(scales.shape, generator=random) - 0.5).to(form.scales) if form.minima else None
    book = book_of(BNB_TABLES["nf4"], CPU) if form.kind == "table" else None
    return PackedMatrices(
        codes.view(form.codes), scales, minima, inputs, group, form.field, form.kind, False, form.dtype, book
    )


def stage_of(matrices: PackedMatrices) -> Tensor:
    """Return shared memory with all codes, swizzled, scales and minima."""
    codes = matrices.codes[0].view(torch.uint8)
    chunks = codes.view(len(codes), 8, 16)
    place = torch.arange(8)[None] ^ (torch.arange(len(codes)) % 8)[:, None]
    turned = torch.empty_like(chunks).scatter_(1, place[..., None].expand_as(chunks), chunks)
    factors = [matrices.scales] if matrices.minima is None else [matrices.scales, matrices.minima]
    return torch.cat([turned.flatten(), *(one.contiguous().view(torch.uint8).flatten() for one in factors)])


def passed_to_units(values: Tensor, *, first: bool, dtype: torch.dtype) -> Tensor:
    """Return the operands [threads, units, 32] of `wgmma` with the shape m64k16, of values [outputs, inputs].

    https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-register-fragment
    """
    half = len(values) // 2
    order = torch.arange(len(values))
    if first:  # warps have 8 outputs of the gate and the 8 that they gate
        order = torch.stack([order[:half].view(-1, 8), order[half:].view(-1, 8)], dim=1).flatten()
    # Warp, upper 8 outputs, g; unit, r, upper 8 inputs, t, second of a pair.
    fragments = values[order].view(len(values) // 16, 2, 8, -1, 4, 2, 4, 2)
    return fragments.permute(0, 2, 6, 3, 4, 5, 1, 7).reshape(2 * len(values), -1, 32).to(dtype).float()
