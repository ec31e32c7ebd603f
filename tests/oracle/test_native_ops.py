"""The native kernels, each instruction set's path of each, against float64, with inputs that differ with every run."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from levels import ISAS, needs_isa
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype, Epilogue, StepArgs
from octavo.native.builder import BLOCK, NormArgs, ProgramBuilder, Results, row_bytes
from octavo.native.program import Pool, Program
from octavo.nn.ops.rope import apply_rope
from octavo.nn.quant.blocks import alike, dequantized
from octavo.nn.quant.panels import interleave, pack, pack_blocks, pad_bias
from octavo.nn.weights import QuantizedBlocks

TORCH = {Dtype.FLOAT: torch.float32, Dtype.BFLOAT: torch.bfloat16}
# Of sums of order 1: float32 arithmetic; in bfloat16 one more rounding of what is put out in it.
TOLERANCE = {Dtype.FLOAT: 2e-5, Dtype.BFLOAT: 2e-5}
PAIRS = ("avx512", "avx2", "portable")
"""Levels that keep 16-bit activations in pairs (native/src/blocks.h)."""
FORMATS = {
    "4 bits, minima": (4, 8, True),
    "4 bits": (4, 8, False),
    "5 bits": (8, 16, False),
    "8 bits": (8, 128, False),
    "8 bits, minima": (8, 128, True),
}


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    return Pool(2, needs_isa(request.param))


@pytest.fixture
def generator(request):
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def run(pool: Pool, builder: ProgramBuilder, source: Tensor, result: Tensor, **batch: int) -> Tensor:
    """All of the builder's operations over the rows of `source`, the first external buffer; `result` is the second."""
    step = StepArgs(tokens=source.shape[0], **batch)
    step.external[:2] = (source.data_ptr(), result.data_ptr())
    Program(pool, builder).run(0, len(builder.ops), step)
    return result


def test_copies_are_put_where_they_belong(pool, generator):
    """From a place on, and to a place for each value; other values stay."""
    x = torch.randn(5, 40, generator=generator)
    places = torch.randperm(96, generator=generator)[:40].int()
    for begin, address in ((7, 0), (0, places.data_ptr())):
        b = ProgramBuilder.make(40 * 4, 96 * 4)
        b.copy(0, 1, 40, begin=begin, places=address)
        result = torch.full((5, 96), -1.0)
        expected = result.clone()
        expected[:, places.long() if address else torch.arange(7, 47)] = x
        torch.testing.assert_close(run(pool, b, x, result), expected, rtol=0, atol=0)


def random_blocks(generator: torch.Generator, rows: int, columns: int, kind: str) -> QuantizedBlocks:
    bits, zero_point, has_minima = FORMATS[kind]
    shape = (rows, columns // 32)
    scales = (torch.rand(shape, generator=generator) / zero_point).half()
    minima = (torch.rand(shape, generator=generator) - 0.5).half() if has_minima else None
    values = torch.randint(0, 2 * zero_point, (rows, columns), generator=generator, dtype=torch.uint8)
    return QuantizedBlocks(values, scales, minima, zero_point, bits)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: Epilogue, before: Tensor) -> Tensor:
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if epilogue is Epilogue.ADD:
        return before.double() + y
    if epilogue is Epilogue.GATE:
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    return y


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 576, 192), (2, 96, 64), (5, 160, 160), (12, 32, 48), (13, 224, 96), (29, 64, 32), (260, 96, 1536)],
)
def test_linear(pool, generator, dtype, epilogue, tokens, rows, columns):
    weight = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(TORCH[dtype])
    x = torch.randn(tokens, columns, generator=generator).to(TORCH[dtype])
    bias = torch.randn(rows, generator=generator)
    halves = epilogue is Epilogue.GATE
    gated = dtype if halves else Dtype.FLOAT
    before = torch.randn(tokens, rows // (2 if halves else 1), generator=generator)
    panels, padded = pack(weight), pad_bias(bias)
    if halves:
        panels, padded = interleave(*panels.chunk(2)), interleave(*padded.chunk(2))
    result = before.to(TORCH[gated], copy=True)
    b = ProgramBuilder.make(columns * x.element_size(), result.shape[1] * result.element_size())
    b.linear(
        0,
        1,
        dtype,
        rows,
        columns,
        panels.data_ptr(),
        results=Results(epilogue, gated),
        bias=padded.data_ptr(),
    )
    got = run(pool, b, x, result)
    expected = reference(x, weight, bias, epilogue, before)
    limit = 1e-2 if gated is Dtype.BFLOAT else TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), expected, atol=limit, rtol=limit)


def quantized(pool: Pool, x: Tensor, planes: int, zero_point: int) -> Tensor:
    """The rows as the kernels keep them, [T, bytes]."""
    tokens, columns = x.shape
    width = row_bytes(Dtype.INT8, columns, planes)
    b = ProgramBuilder.make(columns * 4, width, planes)
    b.quantize(0, 1, Dtype.FLOAT, columns, zero_point=zero_point)
    return run(pool, b, x, torch.zeros(tokens, width, dtype=torch.uint8))


def whole_numbers(pool: Pool, blocks: Tensor) -> Tensor:
    """16-bit values [T, blocks, 32]: planes of bytes, or pairs where no instruction multiplies four bytes."""
    if pool.level in PAIRS:
        pairs = blocks.view(torch.int16).double().unflatten(2, (2, BLOCK // 4, 2))  # [odd, four, pair]
        return pairs.permute(0, 1, 3, 4, 2).flatten(2)
    high, low = blocks.view(torch.int8).double().unflatten(2, (2, BLOCK)).unbind(2)
    return high * 256 + low


def read(pool: Pool, rows: Tensor, columns: int, planes: int, zero_point: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [T, K], then scales and scaled sums [T, K / 32], in float64."""
    blocks = rows[:, : row_bytes(Dtype.INT8, columns, planes)].unflatten(1, (columns // BLOCK, -1))
    stored = blocks[..., : BLOCK * planes].contiguous()
    ends = blocks[..., BLOCK * planes :].contiguous()
    floats, integers = ends.view(torch.float32).double(), ends.view(torch.int32).double()
    if planes == 2:
        whole = whole_numbers(pool, stored)
        assert torch.equal(integers[..., 2], -zero_point * whole.sum(-1))
        return whole.flatten(1), floats[..., 0], floats[..., 1]
    whole = stored.view(torch.int8).double()
    starts = floats[..., 1].float().view(torch.int32).double() - zero_point * whole.sum(-1)
    assert torch.equal(integers[..., 0], starts)
    pairs = ends[..., 8:].contiguous().view(torch.bfloat16)[:, 0::2].double().flatten(1)
    return whole.flatten(1), floats[..., 1] / 12582912, pairs[:, : columns // BLOCK]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("columns", [32, 96, 576])
def test_quantize(pool, generator, planes, columns):
    x = torch.randn(9, columns, generator=generator) * torch.rand(9, 1, generator=generator) * 100
    integers, scales, scaled_sums = read(pool, quantized(pool, x, planes, 8), columns, planes, 8)
    blocks = integers.unflatten(1, (-1, 32))
    most = blocks.abs().amax(-1)
    assert most.max() <= (127 if planes == 1 else 32639)
    assert most.min() >= (63 if planes == 1 else 32639)
    error = (blocks * scales[..., None] - x.double().unflatten(1, (-1, 32))).abs()
    assert (error <= scales[..., None] * 0.51).all()
    if planes == 1:
        assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5)), "not powers of two"
    sums = blocks.sum(-1) * scales
    torch.testing.assert_close(scaled_sums, sums.bfloat16().double() if planes == 1 else sums)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 96, 64), (7, 160, 96), (31, 64, 576)])
def test_integer_linear(pool, generator, kind, planes, epilogue, tokens, rows, columns):
    halves = epilogue is Epilogue.GATE
    parts = [random_blocks(generator, rows // (2 if halves else 1), columns, kind) for _ in range(2 if halves else 1)]
    weight = torch.cat([dequantized(replace(part, minima=None), torch.float32) for part in parts])
    panels = interleave(*map(pack_blocks, parts)) if halves else pack_blocks(parts[0])
    before = torch.randn(tokens, rows // (2 if halves else 1), generator=generator)
    zero_point, has_minima = parts[0].zero_point, parts[0].minima is not None
    x = quantized(pool, torch.randn(tokens, columns, generator=generator), planes, zero_point)
    result = before.clone()
    b = ProgramBuilder.make(x.shape[1], result.shape[1] * 4, planes)
    dtype = Dtype.INT4 if parts[0].bits == 4 else Dtype.INT8
    address = panels.data_ptr()
    b.linear(0, 1, dtype, rows, columns, address, results=Results(epilogue), zero_point=zero_point, minima=has_minima)
    got = run(pool, b, x, result)
    integers, scales, scaled_sums = read(pool, x, columns, planes, zero_point)
    values = (integers.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)
    if has_minima:  # they meet each block's sum, both in bfloat16 where the values are of 8 bits
        minima = torch.cat([part.minima for part in parts])
        weight = torch.cat([weight, minima.bfloat16() if planes == 1 else minima], dim=1)
        values = torch.cat([values, scaled_sums], dim=1)
    expected = reference(values, weight, None, epilogue, before)
    torch.testing.assert_close(got.double(), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tokens", [1, 6, 13])
def test_the_largest_sums_of_integers_fit(pool, kind, planes, sign, tokens):
    """All values and all activations at the end of their range, which nothing may wrap around or saturate at."""
    bits, zero_point, has_minima = FORMATS[kind]
    rows, columns = 48, 96
    blocks = QuantizedBlocks(
        torch.full((rows, columns), 2 * zero_point - 1, dtype=torch.uint8),
        torch.ones(rows, columns // BLOCK).half(),
        torch.zeros(rows, columns // BLOCK).half() if has_minima else None,
        zero_point,
        bits,
    )
    panels, largest = pack_blocks(blocks), 127 if planes == 1 else 32639
    b = ProgramBuilder.make(columns * 4, rows * 4, planes)
    integers = b.buffer(row_bytes(Dtype.INT8, columns, planes))
    dtype = Dtype.INT4 if bits == 4 else Dtype.INT8
    b.quantize(0, integers, Dtype.FLOAT, columns, zero_point=zero_point)
    b.linear(integers, 1, dtype, rows, columns, panels.data_ptr(), zero_point=zero_point, minima=has_minima)
    got = run(pool, b, torch.full((tokens, columns), float(sign * largest)), torch.empty(tokens, rows))
    expected = torch.full((tokens, rows), float(sign * largest * (zero_point - 1) * columns))
    torch.testing.assert_close(got, expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("planes", [1, 2])
def test_rows_of_zeros_and_flawed_rows(pool, planes):
    """Nothing divides by zero, and a NaN or infinity is not lost on the way to integers."""
    x = torch.zeros(3, 64)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    blocks = random_blocks(torch.Generator().manual_seed(1), 16, 64, "8 bits")
    panels = pack_blocks(blocks)
    b = ProgramBuilder.make(256, 64, planes)
    integers = b.buffer(row_bytes(Dtype.INT8, 64, planes))
    b.quantize(0, integers, Dtype.FLOAT, 64, zero_point=128)
    b.linear(integers, 1, Dtype.INT8, 16, 64, panels.data_ptr(), zero_point=128)
    got = run(pool, b, x, torch.ones(3, 16))
    assert torch.equal(got[0], torch.zeros(16))
    assert not torch.isfinite(got[1:]).any()


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("size", [16, 64, 576, 1104])
def test_norm(pool, generator, dtype, size):
    x, weight = torch.randn(5, size, generator=generator), torch.randn(size, generator=generator)
    result = torch.empty(5, size, dtype=TORCH[dtype])
    b = ProgramBuilder.make(size * 4, size * result.element_size())
    b.norm(0, 1, dtype, NormArgs(size, 1e-5, weight.data_ptr()))
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    limit = 1e-2 if dtype is Dtype.BFLOAT else 3e-6
    torch.testing.assert_close(run(pool, b, x, result).double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("rotary_dim", [32, 24, 8])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_turns_queries_after_their_norm(pool, generator, rotary_dim, normed):
    tokens, heads, kv_heads, dim, block_size = 7, 4, 2, 32, 16
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator)
    cos_sin = torch.randn(40, rotary_dim, generator=generator)
    positions = torch.randint(0, 40, (tokens,), generator=generator)
    norms = torch.rand(2, dim, generator=generator) + 0.5
    q = qkv[:, :heads].double()
    q = F.rms_norm(q, (dim,), norms[0].double(), 1e-6) if normed else q.clone()
    expected, _ = apply_rope(q, torch.zeros(tokens, 1, dim).double(), cos_sin.double(), positions)
    result, cache = torch.empty(tokens, heads, dim), torch.zeros(1, kv_heads, 2, block_size, dim)
    b = ProgramBuilder.make(qkv[0].numel() * 4, heads * dim * 4)
    addresses = (norms[0].data_ptr(), norms[1].data_ptr()) if normed else (0, 0)
    shape = (heads, kv_heads, dim)
    stride, table = cache[0].nbytes, cos_sin.data_ptr()
    places = {"block_stride": stride, "norms": addresses}
    b.rope(0, 1, Dtype.FLOAT, shape, rotary_dim, table, cache.data_ptr(), **places, eps=1e-6)
    slots = torch.arange(tokens)
    run(pool, b, qkv, result, positions=positions.data_ptr(), slots=slots.data_ptr(), block_size=block_size)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_embedding(pool, generator, dtype, packed):
    table = torch.randn(37, 64, generator=generator).to(TORCH[dtype])
    stored = pack(table) if packed else table
    ids = torch.randint(0, 37, (9,), generator=generator)
    result = torch.empty(9, 64)
    b = ProgramBuilder.make(0, 256)
    b.embed(stored.data_ptr(), dtype, 64, 1, packed=packed)
    run(pool, b, ids, result, input_ids=ids.data_ptr())
    assert torch.equal(result, table[ids].float())


@pytest.mark.parametrize("kind", FORMATS)
def test_embedding_of_integers(pool, generator, kind):
    blocks = random_blocks(generator, 37, 64, kind)
    panels, ids = pack_blocks(blocks), torch.randint(0, 37, (9,), generator=generator)
    result = torch.empty(9, 64)
    b = ProgramBuilder.make(0, 256)
    dtype = Dtype.INT4 if blocks.bits == 4 else Dtype.INT8
    zero_point, has_minima = blocks.zero_point, blocks.minima is not None
    b.embed(panels.data_ptr(), dtype, 64, 1, packed=True, zero_point=zero_point, minima=has_minima)
    run(pool, b, ids, result, input_ids=ids.data_ptr())
    torch.testing.assert_close(result, dequantized(blocks, torch.float32)[ids], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kind", ["float", "4 bits, minima", "8 bits, minima", "8 bits"])
def test_a_row_gives_the_same_bits_in_any_batch(pool, generator, kind, planes):
    columns, rows = 160, 96
    x = torch.randn(40, columns, generator=generator)
    b = ProgramBuilder.make(columns * 4, rows * 4, planes)
    if kind == "float":
        panels = pack(torch.randn(rows, columns, generator=generator))
        b.linear(0, 1, Dtype.FLOAT, rows, columns, panels.data_ptr())
    else:
        blocks = random_blocks(generator, rows, columns, kind)
        panels, zero_point, has_minima = pack_blocks(blocks), blocks.zero_point, blocks.minima is not None
        dtype = Dtype.INT4 if blocks.bits == 4 else Dtype.INT8
        integers = b.buffer(row_bytes(Dtype.INT8, columns, planes))
        b.quantize(0, integers, Dtype.FLOAT, columns, zero_point=zero_point)
        b.linear(integers, 1, dtype, rows, columns, panels.data_ptr(), zero_point=zero_point, minima=has_minima)
    whole = run(pool, b, x, torch.empty(40, rows))
    for first, count in ((0, 1), (1, 2), (4, 3), (9, 4), (3, 5), (17, 7), (11, 12), (20, 13)):
        part = run(pool, b, x[first : first + count].contiguous(), torch.empty(count, rows))
        assert torch.equal(part, whole[first : first + count])


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("columns", [32, 96, 160, 576])
@pytest.mark.parametrize("normed", [False, True])
def test_integers_of_a_row_are_the_same_with_any_rows_and_threads(pool, generator, planes, columns, normed):
    """Small steps divide a row's columns among threads."""
    x, weight = torch.randn(40, columns, generator=generator), torch.rand(columns, generator=generator)
    width = row_bytes(Dtype.INT8, columns, planes)
    b = ProgramBuilder.make(columns * 4, width, planes)
    if normed:
        b.norm(0, 1, Dtype.INT8, NormArgs(columns, 1e-5, weight.data_ptr()), zero_point=8)
    else:
        b.quantize(0, 1, Dtype.FLOAT, columns, zero_point=8)
    whole = run(Pool(1, pool.isa), b, x, torch.zeros(40, width, dtype=torch.uint8))
    for threads in (1, 2, 3, 7):
        other = Pool(threads, pool.isa)
        for first, count in ((0, 1), (1, 2), (4, 3), (9, 4), (17, 7), (0, 32), (0, 40)):
            part = run(other, b, x[first : first + count].contiguous(), torch.zeros(count, width, dtype=torch.uint8))
            assert torch.equal(part, whole[first : first + count]), (threads, count)


def test_parts_in_different_formats_meet_in_one_that_holds_both(generator):
    parts = [random_blocks(generator, 32, 64, kind) for kind in ("4 bits, minima", "8 bits")]
    same = alike(parts)
    assert {(part.bits, part.zero_point) for part in same} == {(8, 128)}
    for part, before in zip(same, parts, strict=True):
        torch.testing.assert_close(dequantized(part, torch.float32), dequantized(before, torch.float32))
