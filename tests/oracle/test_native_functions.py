"""Norms, functions of products' results and tables in the native kernels against float64, with inputs that differ with
every run."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
import torch
from levels import ISAS, needs_isa
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype, Epilogue, Function, StepArgs
from octavo.native.builder import NormArgs, ProgramBuilder, Results, row_bytes
from octavo.native.program import Pool, Program
from octavo.nn.ops.activation import ACTIVATIONS
from octavo.nn.quant.panels import pack, pack_blocks, pad_bias
from octavo.nn.weights import QuantizedBlocks

TORCH = {Dtype.FLOAT: torch.float32, Dtype.BFLOAT: torch.bfloat16}
LIMIT, SCALE = 1.5, 0.75
CURVE = torch.tensor([0.8, 1.3, 0.5, -1e-6])


def xielu(x: Tensor) -> Tensor:
    """`nn/ops/activation.py` in float64."""
    positive, negative, slope, most = CURVE.double()
    below = torch.expm1(torch.minimum(x, most)) - x
    return torch.where(x > 0, positive * x * x, negative * below) + slope * x


FUNCTIONS = {
    Function.XIELU: xielu,
    Function.IDENTITY: lambda x: x,
    Function.CAP: lambda x: LIMIT * torch.tanh(x / LIMIT),
    Function.CLIP: lambda x: x.clamp(-LIMIT, LIMIT),
    **{Function[name.upper()]: activation for name, activation in ACTIVATIONS.items()},
}
FORMS = [
    (Dtype.FLOAT, 0),
    (Dtype.BFLOAT, 0),
    *((dtype, planes) for dtype in (Dtype.INT8, Dtype.INT4) for planes in (0, 1, 2)),
]


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    return Pool(2, needs_isa(request.param))


@pytest.fixture
def generator():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def run(pool: Pool, builder: ProgramBuilder, source: Tensor, result: Tensor, **batch: int) -> Tensor:
    """All of the builder's operations over the rows of `source`, the first external buffer; `result` is the second."""
    step = StepArgs(tokens=source.shape[0], **batch)
    step.external[:2] = (source.data_ptr(), result.data_ptr())
    Program(pool, builder).run(0, len(builder.ops), step)
    return result


def panels_of(generator: torch.Generator, dtype: Dtype, rows: int, columns: int) -> Tensor:
    """A random matrix as the kernels store it, with results of order 1."""
    if dtype in TORCH:
        return pack((torch.randn(rows, columns, generator=generator) / columns**0.5).to(TORCH[dtype]))
    bits, zero_point = (4, 8) if dtype is Dtype.INT4 else (8, 128)
    values = torch.randint(0, 2 * zero_point, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.rand(rows, columns // 32, generator=generator) / zero_point / columns**0.5
    return pack_blocks(QuantizedBlocks(values, scales.half(), None, zero_point, bits))


@pytest.mark.parametrize(("dtype", "planes"), FORMS, ids=str)
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 96), (7, 224), (13, 32)])
def test_functions_of_results(pool, generator, dtype, planes, epilogue, tokens, rows):
    """Of what the plain product stores: `test_native_ops.py` compares that with float64."""
    columns, gated = 96, epilogue is Epilogue.GATE
    x, bias = torch.randn(tokens, columns, generator=generator), torch.randn(rows, generator=generator)
    panels, padded = panels_of(generator, dtype, rows, columns), pad_bias(bias)
    kept = torch.randn(tokens, rows // (2 if gated else 1), generator=generator)

    def product(results: Results, to: Tensor) -> Tensor:
        b = ProgramBuilder.make(columns * 4, to.shape[1] * to.element_size(), planes)
        given = b.buffer(row_bytes(b.meets(dtype), columns, planes))
        if dtype in (Dtype.INT8, Dtype.INT4):
            zero_point = 8 if dtype is Dtype.INT4 else 128
            b.quantize(0, given, Dtype.FLOAT, columns, zero_point=zero_point)
        else:
            zero_point = 0
            b.narrow(0, given, columns)
            given = 0 if dtype is Dtype.FLOAT else given
        address = panels.data_ptr()
        b.linear(
            given, 1, dtype, rows, columns, address, results=results, bias=padded.data_ptr(), zero_point=zero_point
        )
        return run(pool, b, x, to)

    plain = product(Results(), torch.empty(tokens, rows)).double()
    for function, of in FUNCTIONS.items():
        results = Results(epilogue, Dtype.FLOAT, function, SCALE, LIMIT, CURVE.data_ptr())
        if gated:
            gate, up = plain.unflatten(1, (-1, 2, 16)).unbind(2)
            expected = (of(SCALE * gate) * up).flatten(1)
        else:
            expected = of(SCALE * plain) + (kept.double() if epilogue is Epilogue.ADD else 0.0)
        got = product(results, kept.clone())
        torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=2e-6, msg=lambda m, f=function: f"{f!r} {m}")
        if epilogue is not Epilogue.ADD:
            half = product(replace(results, dtype=Dtype.BFLOAT), kept.bfloat16())
            assert torch.equal(half, got.bfloat16()), function


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
def test_functions_from_very_small_to_very_large(pool, function):
    """Exact to float32's rounding of the argument's size; without overflow; NaN stays NaN."""
    large = torch.tensor([0.0, 1e-6, 20.0, 88.0, 300.0, 1e4, 1e15, math.nan])
    x = torch.cat([torch.linspace(-13, 13, 1600 - 16), large, -large]).view(-1, 16)
    eye = pack(torch.eye(16))
    # The product of a row with NaN is NaN throughout, so that NaN has a row of its own.
    x = torch.where(x.isnan().any(1, keepdim=True) & ~x.isnan(), 0.0, x)
    b = ProgramBuilder.make(64, 64)
    results = Results(function=function, limit=LIMIT, curve=CURVE.data_ptr())
    b.linear(0, 1, Dtype.FLOAT, 16, 16, eye.data_ptr(), results=results)
    got = run(pool, b, x, torch.empty_like(x))
    expected = FUNCTIONS[function](x.double())
    flawed = x.isnan().any(1)
    assert got[flawed].isnan().all()
    torch.testing.assert_close(got[~flawed].double(), expected[~flawed], atol=4e-7, rtol=4e-7)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
@pytest.mark.parametrize("size", [16, 48, 1104])
@pytest.mark.parametrize(("scaled", "biased"), [(True, True), (True, False), (False, False)])
def test_layer_norm(pool, generator, dtype, size, scaled, biased):
    """Rows whose mean is far larger than their deviation, too."""
    x = torch.randn(7, size, generator=generator)
    x[5:] += torch.tensor([[100.0], [-300.0]])
    weight = torch.randn(size, generator=generator) if scaled else None
    bias = torch.randn(size, generator=generator) if biased else None
    result = torch.empty(7, size, dtype=TORCH[dtype])
    b = ProgramBuilder.make(size * 4, size * result.element_size())
    addresses = [0 if t is None else t.data_ptr() for t in (weight, bias)]
    b.norm(0, 1, dtype, NormArgs(size, 1e-5, *addresses, centered=True))
    expected = F.layer_norm(x.double(), (size,), *(None if t is None else t.double() for t in (weight, bias)))
    limit = torch.full((7, 1), 1e-2 if dtype is Dtype.BFLOAT else 4e-6)
    limit[5:] += 1e-4  # the rows' own rounding
    got = run(pool, b, x, result).double()
    assert ((got - expected).abs() <= limit * (1 + expected.abs())).all()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_norm_to_integers_is_that_to_floats_quantized(pool, generator, centered, planes):
    x, weight = torch.randn(5, 96, generator=generator) + 1, torch.randn(96, generator=generator)
    norm, width = NormArgs(96, 1e-5, weight.data_ptr(), centered=centered), row_bytes(Dtype.INT8, 96, planes)
    found = []
    for together in (True, False):
        b = ProgramBuilder.make(96 * 4, width, planes)
        if together:
            b.norm(0, 1, Dtype.INT8, norm, zero_point=8)
        else:
            floats = b.buffer(96 * 4)
            b.norm(0, floats, Dtype.FLOAT, norm)
            b.quantize(floats, 1, Dtype.FLOAT, 96, zero_point=8)
        found.append(run(pool, b, x, torch.zeros(5, width, dtype=torch.uint8)))
    assert torch.equal(*found)


@pytest.mark.parametrize("centered", [False, True])
def test_a_norm_added_to_the_output(pool, generator, centered):
    x, before = (torch.randn(6, 80, generator=generator) for _ in range(2))
    weight = torch.randn(80, generator=generator)
    b = ProgramBuilder.make(320, 320)
    b.norm(0, 1, Dtype.FLOAT, NormArgs(80, 1e-6, weight.data_ptr(), centered=centered), add=0.3)
    norm = F.layer_norm if centered else F.rms_norm
    expected = before.double() + 0.3 * norm(x.double(), (80,), weight.double(), eps=1e-6)
    torch.testing.assert_close(run(pool, b, x, before.clone()).double(), expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_norms_of_groups_in_place(pool, generator, own, centered):
    """Values before and after the groups stay as they are."""
    x = torch.randn(5, 160, generator=generator)
    weight, bias = (torch.randn(3, 32, generator=generator) for _ in range(2))
    if not own:
        weight, bias = weight[:1].expand(3, 32).contiguous(), bias[:1].expand(3, 32).contiguous()
    args = NormArgs(32, 1e-5, weight.data_ptr(), bias.data_ptr() if centered else 0, centered, own_weights=own)
    b = ProgramBuilder.make(640, 0)
    b.norm_groups(0, args, 48, 3)
    groups = x[:, 48:144].double().unflatten(1, (3, 32))
    normed = F.layer_norm(groups, (32,)) if centered else F.rms_norm(groups, (32,), eps=1e-5)
    expected = x.double()
    expected[:, 48:144] = (normed * weight + (bias if centered else 0)).flatten(1)
    run(pool, b, x, x)
    torch.testing.assert_close(x.double(), expected, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_scaled_embeddings_and_positions(pool, generator, dtype):
    tables = [torch.randn(23, 48, generator=generator).to(TORCH[dtype]) for _ in range(2)]
    ids, positions = (torch.randint(0, n, (9,), generator=generator) for n in (23, 20))
    b = ProgramBuilder.make(0, 48 * 4)
    b.embed(tables[0].data_ptr(), dtype, 48, 1, packed=False, scale=2.5)
    b.add_positions(tables[1][3:].data_ptr(), dtype, 48, 1)
    got = run(pool, b, ids, torch.empty(9, 48), input_ids=ids.data_ptr(), positions=positions.data_ptr())
    torch.testing.assert_close(got, tables[0][ids].float() * 2.5 + tables[1][positions + 3].float())
