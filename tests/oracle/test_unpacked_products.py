"""Integer weights that meet bfloat16 activations: each instruction set's products are those of converted weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from levels import ISAS, needs_isa
from test_native_ops import FORMATS, generator, pool, random_blocks, reference, run
from torch import Tensor

from octavo.native.bindings import Dtype, Epilogue
from octavo.native.builder import ProgramBuilder, Results, row_bytes
from octavo.native.program import Pool
from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.panels import interleave, pack, pack_blocks, pad_bias
from octavo.nn.weights import QuantizedBlocks

__all__ = ["generator", "pool"]  # fixtures


def product(
    pool: Pool,
    x: Tensor,
    parts: list[QuantizedBlocks],
    *,
    packed: bool = True,
    epilogue: Epilogue = Epilogue.STORE,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    gated: Dtype = Dtype.FLOAT,
) -> Tensor:
    """x [T, K] bfloat16 times the parts, two of them for the gate; unless `packed`, converted ones."""
    first = parts[0]
    rows, columns = sum(part.values.shape[0] for part in parts), first.values.shape[1]
    if packed:
        panels, dtype = [pack_blocks(part) for part in parts], Dtype.INT4 if first.bits == 4 else Dtype.INT8
    else:
        panels, dtype = [pack(dequantized(part, torch.bfloat16)) for part in parts], Dtype.BFLOAT
    weight = interleave(*panels) if len(parts) == 2 else panels[0]
    padded = None if bias is None else pad_bias(bias)
    if padded is not None and len(parts) == 2:
        padded = interleave(*padded.chunk(2))
    width = rows if epilogue is not Epilogue.GATE else rows // 2
    dtypes = {Dtype.FLOAT: torch.float32, Dtype.BFLOAT: torch.bfloat16}
    result = torch.zeros(len(x), width, dtype=dtypes[gated]) if before is None else before.to(dtypes[gated], copy=True)
    form: dict[str, Any] = {"zero_point": first.zero_point, "minima": first.minima is not None} if packed else {}
    # Rows of the output begin where a panel does, so that an odd number of columns has a last panel of its own.
    stride = -(-width // 16) * 16
    room = torch.zeros(len(x), stride, dtype=result.dtype)
    room[:, :width] = result
    b = ProgramBuilder.make(columns * 2, stride * room.element_size(), planes=0)
    address = 0 if padded is None else padded.data_ptr()
    b.linear(0, 1, dtype, rows, columns, weight.data_ptr(), results=Results(epilogue, gated), bias=address, **form)
    return run(pool, b, x, room)[:, :width]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 96, 32), (33, 160, 96), (300, 64, 1056)])
def test_products_are_those_of_weights_rounded_to_bfloat16(pool, generator, kind, epilogue, tokens, rows, columns):
    gates = epilogue is Epilogue.GATE
    parts = [random_blocks(generator, rows // (1 + gates), columns, kind) for _ in range(1 + gates)]
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    bias = torch.randn(rows, generator=generator)
    before = torch.randn(tokens, rows // (1 + gates), generator=generator)
    got = product(pool, x, parts, epilogue=epilogue, bias=bias, before=before).double()
    expected = reference(x, torch.cat([dequantized(p, torch.bfloat16) for p in parts]), bias, epilogue, before)
    torch.testing.assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-5)
    # The rounding of weights to 8 significant bits, each within 1 / 256 of itself.
    exact = torch.cat([dequantized(p, torch.float32) for p in parts])
    if epilogue is not Epilogue.GATE:
        limit = x.double().abs() @ exact.double().abs().T / 256 + 1e-5 * float(expected.abs().max())
        assert ((got - reference(x, exact, bias, epilogue, before)).abs() <= limit).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 96), (41, 320)])
def test_every_weight_is_the_converted_one_bit_for_bit(pool, generator, kind, rows, columns):
    """Rows of the identity read them out. Some blocks have no scale, negative ones, or a minimum far smaller."""
    blocks = random_blocks(generator, rows, columns, kind)
    blocks.scales[::3] *= -1
    blocks.scales[1::5] = 0
    if blocks.minima is not None:
        blocks.minima[::2] /= 1000
    expected = dequantized(blocks, torch.bfloat16).T.float()
    assert torch.equal(product(pool, torch.eye(columns).bfloat16(), [blocks]), expected)


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_products_have_the_bits_of_those_with_converted_weights(isa, data):
    team = Pool(2, needs_isa(isa))
    draw = data.draw
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    kind, epilogue = draw(st.sampled_from(sorted(FORMATS))), draw(st.sampled_from(Epilogue))
    tokens, columns = draw(st.integers(1, 40) | st.integers(250, 520)), 32 * draw(st.integers(1, 9))
    count = 2 if epilogue is Epilogue.GATE else 1
    rows = 16 * draw(st.integers(1, 5)) if count == 2 else draw(st.integers(1, 100))
    parts = [random_blocks(random, rows, columns, kind) for _ in range(count)]
    x = torch.randn(tokens, columns, generator=random).bfloat16()
    gated = draw(st.sampled_from([Dtype.FLOAT, Dtype.BFLOAT])) if count == 2 else Dtype.FLOAT
    before = torch.randn(tokens, rows, generator=random)
    given: dict[str, Any] = {"epilogue": epilogue, "before": before, "gated": gated}
    assert torch.equal(product(team, x, parts, **given), product(team, x, parts, packed=False, **given))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_gives_the_same_bits_in_any_batch(pool, generator, kind):
    blocks = [random_blocks(generator, 96, 160, kind)]
    x = torch.randn(300, 160, generator=generator).bfloat16()
    whole = product(pool, x, blocks)
    for first, count in ((0, 1), (3, 5), (11, 12), (20, 33), (100, 200), (299, 1)):
        assert torch.equal(product(pool, x[first : first + count].contiguous(), blocks), whole[first : first + count])


@pytest.mark.parametrize("columns", [32, 576])
def test_rows_of_floats_are_rounded_once(pool, generator, columns):
    x = torch.randn(9, columns, generator=generator) * 100
    b = ProgramBuilder.make(columns * 4, columns * 2, planes=0)
    b.quantize(0, 1, Dtype.FLOAT, columns)
    assert torch.equal(run(pool, b, x, torch.empty(9, columns, dtype=torch.bfloat16)), x.bfloat16())


@pytest.mark.parametrize("given", [Dtype.FLOAT, Dtype.BFLOAT])
@pytest.mark.parametrize("planes", [0, 1, 2])
def test_values_are_taken_in_the_order_of_the_weights(pool, generator, given, planes):
    x, order = torch.randn(9, 96, generator=generator).bfloat16(), torch.randperm(96, generator=generator).int()
    rows = x.float() if given is Dtype.FLOAT else x
    width = row_bytes(Dtype.INT8 if planes else Dtype.BFLOAT, 96, planes)
    found = []
    for source, places in ((rows, order.data_ptr()), (rows[:, order.long()].contiguous(), 0)):
        b = ProgramBuilder.make(96 * source.element_size(), width, planes=planes)
        if planes == 0 and given is Dtype.BFLOAT and not places:
            found.append(source.view(torch.uint8))
            continue
        b.quantize(0, 1, given, 96, order=places)
        found.append(run(pool, b, source, torch.zeros(9, width, dtype=torch.uint8)))
    assert torch.equal(*found)


def test_flaws_are_not_lost(pool, generator):
    blocks = [random_blocks(generator, 32, 64, "4 bits, minima")]
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[1, 40], x[2, 3] = torch.nan, torch.inf
    got = product(pool, x, blocks)
    assert torch.equal(got[0], torch.zeros(32))
    assert not torch.isfinite(got[1:]).any()
