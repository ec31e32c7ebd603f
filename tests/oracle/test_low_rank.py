"""Low-rank additions to products by the native kernels, against float64, with inputs that differ with every run."""

from __future__ import annotations

import os

import pytest
import torch
from levels import ISAS, needs_isa
from torch import Tensor
from torch.nn import functional as F
from toy_additions import TORCH, Additions

from octavo.native.bindings import Dtype, Epilogue, StepArgs
from octavo.native.builder import BLOCK, NormArgs, ProgramBuilder, Results, row_bytes
from octavo.native.program import Pool, Program
from octavo.nn.quant.panels import interleave, pack, pack_blocks, pad_bias
from octavo.nn.weights import QuantizedBlocks


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    return Pool(2, needs_isa(request.param))


@pytest.fixture
def generator():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def run(pool: Pool, builder: ProgramBuilder, source: Tensor, result: Tensor, count: int) -> Tensor:
    step = StepArgs(tokens=count)
    step.external[:2] = (source.data_ptr(), result.data_ptr())
    Program(pool, builder).run(0, len(builder.ops), step)
    return result


def spread(generator: torch.Generator, tokens: int, count: int) -> Tensor:
    """An addition for each token, or none; several rows in a row often have the same."""
    repeated = torch.randint(-1, count, (tokens,), generator=generator).repeat_interleave(3)
    mixed = torch.randint(-1, count, (tokens,), generator=generator)
    return torch.where(torch.rand(tokens, generator=generator) < 0.5, repeated[:tokens], mixed).int()


@pytest.mark.parametrize("stored", TORCH, ids=str)
@pytest.mark.parametrize("epilogue", Epilogue, ids=str)
@pytest.mark.parametrize(
    ("tokens", "columns", "outputs"),
    [(1, 192, [96, 96]), (2, 64, [32, 32]), (5, 208, [48, 48]), (17, 80, [64, 64]), (70, 48, [16, 16])],
)
def test_additions_to_products(pool, generator, stored, epilogue, tokens, columns, outputs):
    """Ranks from 1 to 64 mixed in one batch, with rows that have none, before bias and gate."""
    halves = epilogue is Epilogue.GATE
    outputs = outputs if halves else [*outputs, 32]
    additions = Additions(stored, columns, outputs, generator)
    for ranks in ([1] * 3, [4, 0, 7], [64, 16, 3], [0] * 3):
        additions.add(ranks[: len(outputs)], factors=ranks[0] == 4)
    rows = sum(outputs)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    x, bias = torch.randn(tokens, columns, generator=generator), torch.randn(rows, generator=generator)
    of_tokens = spread(generator, tokens, len(additions.given))
    before = torch.randn(tokens, rows // (2 if halves else 1), generator=generator)
    panels, padded = pack(weight), pad_bias(bias)
    if halves:
        panels, padded = interleave(*panels.chunk(2)), interleave(*padded.chunk(2))
    b = ProgramBuilder.make(columns * 4, before.shape[1] * 4)
    table = additions.table(of_tokens)
    b.shrink(0, Dtype.FLOAT, columns, table)
    b.linear(
        0,
        1,
        Dtype.FLOAT,
        rows,
        columns,
        panels.data_ptr(),
        results=Results(epilogue),
        bias=padded.data_ptr(),
        low_rank=table,
    )
    got = run(pool, b, x, before.clone(), tokens)
    y = additions.applied(x, x.double() @ weight.double().T, of_tokens) + bias.double()
    if epilogue is Epilogue.ADD:
        y = before.double() + y
    elif halves:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    torch.testing.assert_close(got.double(), y, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("planes", [0, 1, 2])
@pytest.mark.parametrize("given", TORCH, ids=str)
def test_additions_read_the_rows_before_they_are_rounded(pool, generator, planes, given):
    """Weights are integers; the product's input is quantized beside the addition."""
    tokens, columns, rows = 19, 64, 48
    additions = Additions(Dtype.BFLOAT, columns, [rows], generator)
    additions.add([5])
    additions.add([16])
    x = torch.randn(tokens, columns, generator=generator).to(TORCH[given])
    of_tokens = spread(generator, tokens, 2)
    values = torch.full((rows, columns), 8, dtype=torch.uint8)
    blocks = QuantizedBlocks(values, torch.ones(rows, columns // BLOCK).half(), None, 8, 4)  # all 0
    panels = pack_blocks(blocks)
    b = ProgramBuilder.make(columns * x.element_size(), rows * 4, planes)
    table = additions.table(of_tokens)
    meets = b.meets(Dtype.INT4)
    rounded = b.scratch("rounded", row_bytes(meets, columns, planes))
    if given is not meets:
        b.quantize(0, rounded, given, columns, zero_point=8)
        b.run_beside()
    b.shrink(0, given, columns, table)
    source = 0 if given is meets else rounded
    b.linear(source, 1, Dtype.INT4, rows, columns, panels.data_ptr(), zero_point=8, low_rank=table)
    got = run(pool, b, x, torch.empty(tokens, rows), tokens)
    expected = additions.applied(x, torch.zeros(tokens, rows), of_tokens)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_additions_normalize_their_rows_beside_the_norm(pool, generator):
    tokens, columns, rows = 21, 96, 64
    additions = Additions(Dtype.FLOAT, columns, [rows], generator)
    additions.add([12])
    of_tokens = spread(generator, tokens, 1)
    x, scale = torch.randn(tokens, columns, generator=generator), torch.rand(columns, generator=generator) + 0.5
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    panels = pack(weight)
    b = ProgramBuilder.make(columns * 4, rows * 4)
    table, normed = additions.table(of_tokens), b.scratch("normed", columns * 4)
    norm = NormArgs(columns, 1e-5, scale.data_ptr())
    b.norm(0, normed, Dtype.FLOAT, norm)
    b.run_beside()
    b.shrink(0, Dtype.FLOAT, columns, table, norm=norm)
    b.linear(normed, 1, Dtype.FLOAT, rows, columns, panels.data_ptr(), low_rank=table)
    got = run(pool, b, x, torch.empty(tokens, rows), tokens)
    exact = F.rms_norm(x.double(), (columns,), scale.double(), 1e-5)
    expected = additions.applied(exact, exact @ weight.double().T, of_tokens)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("stored", TORCH, ids=str)
def test_a_row_gives_the_same_bits_in_any_batch(pool, generator, stored):
    """Alone, with rows of the same addition, with others, and without any beside it."""
    columns, rows, tokens = 144, 80, 41
    additions = Additions(stored, columns, [rows], generator)
    for rank in (3, 8, 33):
        additions.add([rank])
    x = torch.randn(tokens, columns, generator=generator)
    weight = pack(torch.randn(rows, columns, generator=generator))

    def compute(x: Tensor, of_tokens: Tensor) -> Tensor:
        b, table = ProgramBuilder.make(columns * 4, rows * 4), additions.table(of_tokens)
        b.shrink(0, Dtype.FLOAT, columns, table)
        b.linear(0, 1, Dtype.FLOAT, rows, columns, weight.data_ptr(), low_rank=table)
        return run(pool, b, x, torch.empty(len(x), rows), len(x))

    mixed = spread(generator, tokens, 3)
    whole = compute(x, mixed)
    same = {index: compute(x, torch.full((tokens,), index, dtype=torch.int32)) for index in (-1, 0, 1, 2)}
    for t, index in enumerate(mixed.tolist()):
        assert torch.equal(whole[t], same[index][t])
    for first, count in ((0, 1), (5, 2), (9, 3), (11, 7), (20, 17)):
        cut = slice(first, first + count)
        assert torch.equal(compute(x[cut].contiguous(), mixed[cut].contiguous()), whole[cut])
