"""Weights that are codes: each instruction set's products against float64, and against those of widened weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from levels import ISAS, needs_isa
from test_native_ops import generator, reference, run
from torch import Tensor

from octavo.models.load.gguf_blocks import _NONLINEAR, _SIX_BITS, _THREE_BITS, _TWO_BITS
from octavo.models.load.quantized.codes import FLOATS
from octavo.native.bindings import Dtype, Epilogue
from octavo.native.builder import RESIDUAL, ProgramBuilder, Results
from octavo.native.program import Pool
from octavo.nn.quant.blocks import BlockQuantized, dequantized
from octavo.nn.quant.codes import pack_codes, unified
from octavo.nn.quant.packed import Matrix, emit_lookup, packed
from octavo.nn.quant.panels import interleave, pack
from octavo.nn.weights import E2M1, NARROW, Codebook, QuantizedBlocks

__all__ = ["generator"]  # a fixture

NF4 = Codebook("table", torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.3)
# Numbers; inputs that share a scale (0: all); minima.
FORMATS: dict[str, tuple[Codebook, int, bool]] = {
    "NF4": (NF4, 64, False),
    "NVFP4": (E2M1, 16, False),
    "MXFP4": (E2M1, 32, False),
    "IQ4": (_NONLINEAR, 32, False),
    "Q2_K": (_TWO_BITS, 16, True),
    "Q3_K": (_THREE_BITS, 16, False),
    "Q6_K": (_SIX_BITS, 16, False),
    "Q4_K beside Q6_K": (_SIX_BITS, 32, True),
    "E4M3, a scale per output": (FLOATS[torch.float8_e4m3fn], 0, False),
    "E4M3, tiles": (FLOATS[torch.float8_e4m3fn], 32, False),
    "E5M2": (FLOATS[torch.float8_e5m2], 0, False),
}
CODE_OF = {torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
SHAPES = [(96, 320), (41, 64), (16, 192)]


@pytest.fixture(scope="module", params=ISAS)
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(2, needs_isa(request.param))


def random_codes(generator: torch.Generator, rows: int, columns: int, form: str) -> QuantizedBlocks:
    """All finite codes, and scales of a wide range."""
    book, group, has_minima = FORMATS[form]
    finite = book.numbers.isfinite().nonzero().flatten().to(torch.uint8)
    shape = (rows, columns // (group or columns))
    codes = finite[torch.randint(len(finite), (rows, columns), generator=generator)]
    scales = torch.exp2(torch.rand(shape, generator=generator) * -12) / float(book.numbers[codes.int()].std())
    minima = torch.randn(shape, generator=generator) * scales if has_minima else None
    return QuantizedBlocks(codes, scales, minima, 0, book.bits, book=book)


def product(
    pool: Pool,
    x: Tensor,
    parts: list[QuantizedBlocks],
    *,
    widened: bool = False,
    epilogue: Epilogue = Epilogue.STORE,
    before: Tensor | None = None,
    wide: Dtype = Dtype.FLOAT,
) -> Tensor:
    """x [T, K] times the parts, two of them for the gate; as float32 matrices if `widened`."""
    rows, columns = sum(len(part.values) for part in parts), parts[0].values.shape[1]
    packed = pack_codes(parts)
    panels = [pack(dequantized(part, torch.float32)) for part in parts] if widened else packed.panels
    weight = interleave(*panels) if len(parts) == 2 else panels[0]
    width = rows // len(parts)
    room = torch.zeros(len(x), -(-width // 16) * 16)
    if before is not None:
        room[:, :width] = before
    b = ProgramBuilder.make(x.shape[1] * x.element_size(), room.shape[1] * 4)
    b.wide = wide
    minima = parts[0].minima is not None
    form: dict[str, Any] = {"book": packed.book.data_ptr(), "group": packed.group, "minima": minima}
    dtype = Dtype.FLOAT if widened else packed.dtype
    b.linear(0, 1, dtype, rows, columns, weight.data_ptr(), results=Results(epilogue), **({} if widened else form))
    return run(pool, b, x, room)[:, :width]


def exact(blocks: QuantizedBlocks, of: Callable[[Tensor], Tensor] = lambda term: term) -> Tensor:
    """The values in float64, computed from the definition; or the sum of a function of their terms."""
    assert blocks.book is not None
    numbers = blocks.book.numbers.double()[blocks.values.long()]
    size = blocks.values.shape[1] // blocks.scales.shape[1]
    values = of(numbers * blocks.scales.double().repeat_interleave(size, 1))
    return values if blocks.minima is None else values + of(blocks.minima.double().repeat_interleave(size, 1))


@pytest.mark.parametrize("form", FORMATS)
def test_products_with_any_number_of_rows(pool, generator, form):
    for rows, columns in SHAPES:
        blocks = random_codes(generator, rows, columns, form)
        for tokens in (1, 2, 7, 16, 33, 64, 257):
            x = torch.randn(tokens, columns, generator=generator)
            # Numbers of a table, scales and minima are rounded to 11 bits, the weights of bfloat16 products to 8.
            for given, wide, error in ((x, Dtype.FLOAT, 2**-9.9), (x.bfloat16(), Dtype.BFLOAT, 2**-7.9)):
                off = (product(pool, given, [blocks], wide=wide) - given.double() @ exact(blocks).T).abs()
                assert (off <= error * (given.double().abs() @ exact(blocks, torch.abs).T) + 1e-6).all()
                assert tokens < 7 or off.norm() < 1e-2 * (given.double() @ exact(blocks).T).norm()


@pytest.mark.parametrize("form", ["NF4", "E4M3, tiles"])
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
def test_products_go_through_every_epilogue(pool, generator, form, epilogue):
    count = 2 if epilogue is Epilogue.GATE else 1
    parts = [random_codes(generator, 48, 96, form) for _ in range(count)]
    x, before = torch.randn(5, 96, generator=generator), torch.randn(5, 48, generator=generator)
    expected = reference(x, torch.cat([exact(part) for part in parts]), None, epilogue, before)
    got = product(pool, x, parts, epilogue=epilogue, before=before)
    assert (got - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize("form", FORMATS)
def test_every_weight_is_read(pool, generator, form):
    """Rows of the identity read the weights out: each within the rounding of its scale, number and minimum."""
    blocks = random_codes(generator, 41, 64, form)
    got = product(pool, torch.eye(64), [blocks]).T.double()
    scales = blocks.scales.double().repeat_interleave(64 // blocks.scales.shape[1], 1)
    limit = exact(blocks, torch.abs) * 2**-9.9 + 1e-6 * float(scales.max())
    assert ((got - exact(blocks)).abs() <= limit).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("wide", [Dtype.FLOAT, Dtype.BFLOAT])
def test_a_row_gives_the_same_bits_in_any_batch(pool, generator, form, wide):
    blocks = [random_codes(generator, 96, 320, form)]
    x = torch.randn(300, 320, generator=generator).to(torch.float32 if wide is Dtype.FLOAT else torch.bfloat16)
    whole = product(pool, x, blocks, wide=wide)
    for first, count in ((0, 1), (3, 5), (20, 33), (100, 200)):
        part = product(pool, x[first : first + count].contiguous(), blocks, wide=wide)
        assert torch.equal(part, whole[first : first + count])


def test_products_have_the_bits_of_those_with_widened_weights(pool, generator):
    """Without scales: both add the same products in the same order."""
    blocks = random_codes(generator, 96, 320, "E5M2")
    blocks = replace(blocks, scales=torch.ones(96, 1))
    for tokens in (1, 3, 70):
        x = torch.randn(tokens, 320, generator=generator)
        assert torch.equal(product(pool, x, [blocks]), product(pool, x, [blocks], widened=True))


def narrow(dtype: torch.dtype, weight: Tensor, *, gated: bool = False) -> Matrix:
    scheme = BlockQuantized(torch.float32, torch.device("cpu"))
    scheme.prepare([{"weight": weight.to(dtype)}])
    return packed(scheme, paired=gated)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_weights_of_16_bits_have_the_products_of_float32_bit_for_bit(pool, generator, dtype, gated):
    results = Results(Epilogue.GATE if gated else Epilogue.STORE)
    for rows, columns in ((96, 320), (48, 1540), (32, 4)):
        weight = torch.randn(rows, columns, generator=generator).to(dtype)
        weight[0, :3] = torch.tensor([0.0, -0.0, 1e-7]).to(dtype)  # the last is subnormal in float16
        matrices = [narrow(kind, weight, gated=gated) for kind in (dtype, torch.float32)]
        assert [matrix.dtype for matrix in matrices] == [CODE_OF[dtype], Dtype.FLOAT]
        assert matrices[0].nbytes * 2 == matrices[1].nbytes
        for tokens in (1, 2, 3, 16, 70):
            x, found = torch.randn(tokens, columns, generator=generator), []
            for matrix in matrices:
                b = ProgramBuilder.make(columns * 4, rows * 4)
                matrix.emit(b, 0, 1, results)
                found.append(run(pool, b, x, torch.zeros(tokens, rows)))
            assert torch.equal(*found)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rows_of_16_bits_are_looked_up(pool, generator, dtype):
    weight = torch.randn(41, 64, generator=generator).to(dtype)
    matrix, ids = narrow(dtype, weight), torch.tensor([40, 0, 17])
    b = ProgramBuilder.make(64 * 4, 64 * 4)
    emit_lookup(b, matrix, RESIDUAL, in_panels=True)
    stream = torch.zeros(3, 64)
    run(pool, b, stream, torch.zeros(3, 64), input_ids=ids.data_ptr())
    assert torch.equal(stream, weight[ids].float())


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_looked_up(pool, generator, form):
    blocks = random_codes(generator, 41, 64, form)
    packed = pack_codes([blocks])
    ids = torch.tensor([40, 0, 17, 16, 3])
    b = ProgramBuilder.make(64 * 4, 64 * 4)
    places = {"book": packed.book.data_ptr(), "group": packed.group, "minima": blocks.minima is not None}
    b.embed(packed.panels[0].data_ptr(), packed.dtype, 64, 1, packed=True, scale=2.0, **places)
    got = run(pool, b, torch.zeros(5, 64), torch.zeros(5, 64), input_ids=ids.data_ptr())
    weights = product(pool, torch.eye(64), [blocks]).T
    torch.testing.assert_close(got, weights[ids] * 2, rtol=1e-6, atol=1e-7)


def test_scales_of_any_size_keep_their_precision(pool, generator):
    """Also those far below float16's."""
    blocks = random_codes(generator, 32, 64, "NVFP4")
    for size in (1e-20, 1e12):
        small = QuantizedBlocks(blocks.values, blocks.scales * size, None, 0, 4, book=blocks.book)
        x = torch.randn(3, 64, generator=generator)
        expected = x.double() @ exact(small).T
        assert (product(pool, x, [small]) - expected).norm() < 1e-3 * expected.norm()


def test_integers_beside_codes_become_codes(generator):
    """As of Q4_K_M, whose queries and keys have fewer bits than values; other mixtures have no common form."""
    six = random_codes(generator, 16, 64, "Q6_K")
    scales = torch.rand(16, 2, generator=generator).half() + 0.1
    values = torch.randint(0, 16, (16, 64), generator=generator, dtype=torch.uint8)
    four = QuantizedBlocks(values, scales, scales / 3, 8, 4)
    made = unified([four, six])
    assert made is not None
    for part, before in zip(made, (four, six), strict=True):
        torch.testing.assert_close(dequantized(part, torch.float32), dequantized(before, torch.float32))
        assert part.scales.shape == (16, 4)
        assert part.minima is not None
    assert unified([four, random_codes(generator, 16, 64, "NF4")]) is None
    assert unified([QuantizedBlocks(values + 200, scales, None, 128, 8), six]) is None
