"""Products of bfloat16 by each instruction set: any number of rows, inner sizes and panels that fill no tile."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import ISAS, needs_isa
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype, Epilogue, StepArgs
from octavo.native.builder import ProgramBuilder, Results
from octavo.native.program import Pool, Program
from octavo.nn.quant.panels import PANEL, interleave, pack, pad_bias


@pytest.fixture(scope="module", params=ISAS)
def isa(request):
    return needs_isa(request.param)


@pytest.fixture(scope="module")
def pool(isa):
    return Pool(2, isa)


def padded(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


def multiply(
    pool: Pool,
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue = Epilogue.STORE,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    gated: Dtype = Dtype.FLOAT,
) -> Tensor:
    """x [T, K] times weight [N, K], by the kernels; what whole panels hold beyond N is left out."""
    outputs, columns = weight.shape
    panels, padded_bias = pack(weight), None if bias is None else pad_bias(bias)
    width = padded(outputs)
    if epilogue is Epilogue.GATE:
        panels = interleave(*panels.chunk(2))
        padded_bias = None if padded_bias is None else interleave(*padded_bias.chunk(2))
        width //= 2
    result = torch.full((len(x), width), torch.nan, dtype=torch.bfloat16 if gated is Dtype.BFLOAT else torch.float32)
    if before is not None:
        result[:, : before.shape[1]] = before
    b = ProgramBuilder.make(columns * 2, width * result.element_size())
    address = 0 if padded_bias is None else padded_bias.data_ptr()
    b.linear(0, 1, Dtype.BFLOAT, outputs, columns, panels.data_ptr(), results=Results(epilogue, gated), bias=address)
    step = StepArgs(tokens=len(x))
    step.external[:2] = (x.data_ptr(), result.data_ptr())
    Program(pool, b).run(0, 1, step)
    return result if epilogue is Epilogue.GATE else result[:, :outputs]


def expected(x: Tensor, weight: Tensor, epilogue: Epilogue, bias: Tensor | None, before: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if epilogue is Epilogue.GATE:
        gate, up = y.chunk(2, dim=1)
        return F.silu(gate) * up
    return y if before is None else before.double() + y


@given(
    tokens=st.integers(1, 70),
    outputs=st.integers(1, 100),
    words=st.integers(2, 100),
    epilogue=st.sampled_from(Epilogue),
    has_bias=st.booleans(),
    gated=st.sampled_from([Dtype.FLOAT, Dtype.BFLOAT]),
    seed=st.integers(0, 2**32),
)
def test_all_shapes(pool, tokens, outputs, words, epilogue, has_bias, gated, seed):
    generator = torch.Generator().manual_seed(seed)
    if epilogue is Epilogue.GATE:
        outputs = padded(outputs) * 2
    else:
        gated = Dtype.FLOAT
    columns = 2 * words
    x = torch.randn(tokens, columns, generator=generator).bfloat16()
    weight = (torch.randn(outputs, columns, generator=generator) / columns**0.5).bfloat16()
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    before = torch.randn(tokens, outputs, generator=generator) if epilogue is Epilogue.ADD else None
    got = multiply(pool, x, weight, epilogue, bias, before, gated)
    limit = 1e-2 if gated is Dtype.BFLOAT else 2e-5
    torch.testing.assert_close(got.double(), expected(x, weight, epilogue, bias, before), atol=limit, rtol=limit)


@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.GATE], ids=str)
@pytest.mark.parametrize(("outputs", "columns"), [(96, 576), (96, 90), (160, 1552), (48, 32)])
def test_a_row_has_the_same_bits_alone_and_among_300(pool, isa, epilogue, outputs, columns):
    """And with any number of threads."""
    if epilogue is Epilogue.GATE:
        outputs *= 2
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    x = torch.randn(300, columns, generator=generator).bfloat16()
    weight = torch.randn(outputs, columns, generator=generator).bfloat16()
    whole = multiply(pool, x, weight, epilogue)
    assert torch.equal(multiply(Pool(1, isa), x, weight, epilogue), whole)
    for first, count in [(0, 1), (150, 1), (299, 1), (3, 5), (40, 16), (9, 17), (100, 33), (31, 64), (64, 200)]:
        part = multiply(pool, x[first : first + count].contiguous(), weight, epilogue)
        assert torch.equal(part, whole[first : first + count]), f"rows {first} to {first + count}"


def test_what_is_not_finite_stays_in_its_row(pool):
    x = torch.ones(40, 80).bfloat16()
    x[3, 70], x[20, 5], x[39, 0] = torch.nan, torch.inf, -torch.inf
    finite = multiply(pool, x, torch.ones(32, 80).bfloat16()).isfinite().all(dim=1)
    assert set(torch.nonzero(~finite).flatten().tolist()) == {3, 20, 39}
