"""Additions of adapters by the kernels of a GPU against float64. Without a GPU, those in CUDA C++ are compiled for the
CPU, and those in Triton are interpreted."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from adapter_kit import kernels_on_any_machine
from adapters_in_blocks import World
from cuda_on_cpu import EmulatedKernel
from launches_ahead import collected
from torch import Tensor

from octavo.features.lora import ahead, kernels
from octavo.features.lora.gpu import LowRankDelta, low_rank_delta
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.shard import COL, ROW

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
RANKS = {
    "one part": (40, [56], [[3], [17], [1]]),
    "three parts": (520, [72, 136, 24], [[4, 0, 16], [0, 1, 0], [20, 8, 36]]),
    "small ranks": (64, [40, 24], [[2, 8], [0, 1], [5, 0]]),
    "two halves": (136, [152, 152], [[16, 2], [0, 5], [0, 0]]),
}
"""Inputs, the parts' outputs, and each adapter's ranks."""


@pytest.fixture(autouse=True)
def kernels_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not GPU and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    kernels_on_any_machine(monkeypatch, tmp_path_factory.getbasetemp())


def seed() -> int:
    chosen = int.from_bytes(os.urandom(4), "little")
    print(f"seed {chosen}")
    return chosen


def some(rng: random.Random, rows: int) -> list[int]:
    """Adapters of rows, in a random order: one has more rows than a tile, if there are so many."""
    return rng.sample([-1, *range(3), *([0] * rows)], k=rows) if rows > 3 else rng.choices([-1, 0, 1, 2], k=rows)


def world(case: str, dtype: torch.dtype, chosen: int) -> tuple[World, LowRankDelta]:
    inputs, sizes, ranks = RANKS[case]
    made = World(inputs, sizes, ranks, dtype=dtype, device=DEVICE, seed=chosen, slice_bytes=1536, by_output=True)
    rank = max(max(own) for own in ranks)
    delta = LowRankDelta(made.pool, made.tables, made.target, made.index, rank, made.assigned([], 64))
    return made, delta


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize(("rows", "late"), [(1, False), (24, False), *([] if GPU else [(24, True)])])
def test_adapters_add_to_their_rows_only(
    case: str, rows: int, late: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: the emulator copies into shared memory as late as allowed instead of at once."""
    monkeypatch.setattr(EmulatedKernel, "late", (late,))
    chosen = seed()
    made, delta = world(case, dtype, chosen)
    rng, generator = random.Random(chosen), torch.Generator().manual_seed(chosen)
    adapters = some(rng, rows)
    delta.rows = made.assigned(adapters, 64)
    padding = 3
    x = torch.randn(rows + padding, RANKS[case][0], generator=generator).to(dtype)
    y = torch.randn(rows + padding, sum(made.sizes), generator=generator).to(dtype)
    expected = y.double()
    expected[:rows] += made.addition(x, adapters[:rows] + [-1] * padding)[:rows]
    got = y.to(DEVICE, copy=True)
    delta.begin(x.to(DEVICE)).add_to(got)
    assert off(got, expected) < TOLERANCE[dtype]
    unchanged = [row for row in range(rows + padding) if row >= rows or adapters[row] < 0]
    assert torch.equal(got.cpu()[unchanged], y[unchanged])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_addition_is_gated_with_its_product(dtype: torch.dtype) -> None:
    chosen = seed()
    made, delta = world("two halves", dtype, chosen)
    rng, generator = random.Random(chosen), torch.Generator().manual_seed(chosen)
    adapters = some(rng, 21)
    delta.rows = made.assigned(adapters, 64)
    x, y = (torch.randn(23, size, generator=generator).to(dtype) for size in (136, 304))
    gate, up = (y.double() + made.addition(x, [*adapters, -1, -1])).chunk(2, dim=1)
    got = delta.begin(x.to(DEVICE)).gated(y.to(DEVICE))
    assert got.dtype == dtype
    assert off(got, torch.nn.functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["two halves", "three parts"])
def test_an_addition_alone(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 for parts that an adapter does not change; whatever was there before."""
    chosen = seed()
    made, delta = world(case, dtype, chosen)
    rng, generator = random.Random(chosen), torch.Generator().manual_seed(chosen)
    adapters = some(rng, 21)
    delta.rows = made.assigned(adapters, 64)
    x = torch.randn(23, RANKS[case][0], generator=generator).to(dtype)
    addition = delta.begin(x.to(DEVICE))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: empty(*shape, **how).fill_(torch.nan))
    found = addition.alone()
    assert found is not None
    values, rows = found
    assert [int(row) >= 0 for row in rows[:23]] == [adapter >= 0 for adapter in [*adapters, -1, -1]]
    changed = [row for row, adapter in enumerate(adapters) if adapter >= 0]
    assert values.shape == (23, sum(made.sizes))
    assert off(values[changed], made.addition(x, [*adapters, -1, -1])[changed]) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 13])
def test_more_parts_than_a_launch_adds_to(rows: int) -> None:
    """Of a product that six projections share, each half gets its additions, where its outputs are."""
    chosen = seed()
    rng, generator = random.Random(chosen), torch.Generator().manual_seed(chosen)
    sizes, ranks = [72, 8, 40, 136, 16, 8], [[4, 0, 16, 1, 20, 3], [0, 0, 0, 8, 0, 0], [17, 2, 0, 0, 0, 0]]
    dtype = torch.bfloat16
    made = World(72, sizes, ranks, dtype=dtype, device=DEVICE, seed=chosen, slice_bytes=1536, by_output=True)
    adapters = some(rng, rows)
    delta = low_rank_delta(made.pool, made.tables, made.target, made.index, 20, made.assigned(adapters, 64))
    x, y = (torch.randn(rows, size, generator=generator).to(dtype) for size in (72, sum(sizes)))
    got = y.to(DEVICE, copy=True)
    assert delta.fused_rows == 0
    delta.begin(x.to(DEVICE)).add_to(got)
    assert off(got, y.double() + made.addition(x, adapters)) < TOLERANCE[dtype]
    unchanged = [row for row in range(rows) if adapters[row] < 0]
    assert torch.equal(got.cpu()[unchanged], y[unchanged])


def test_a_rows_addition_does_not_depend_on_the_other_rows() -> None:
    chosen = seed()
    made, delta = world("one part", torch.float32, chosen)
    generator = torch.Generator().manual_seed(chosen)
    x = torch.randn(20, 40, generator=generator).to(DEVICE)

    def added(rows: Sequence[int], adapters: Sequence[int]) -> Tensor:
        delta.rows = made.assigned(adapters, 64)
        y = torch.zeros(len(rows), sum(made.sizes), device=DEVICE)
        delta.begin(x[list(rows)].contiguous()).add_to(y)
        return y

    together = added(range(20), [2, 0, -1, 1] * 5)
    assert torch.equal(added([4, 9], [2, 0]), together[[4, 9]])
    assert torch.equal(added([16, 0, 1], [2, 2, -1])[:2], together[[16, 0]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "extras"),
    [
        ("one part", ("add",)),
        ("three parts", ("norm", "bias")),
        ("two halves", ("norm", "gated")),
        ("two halves", ("wide",)),
    ],
    ids=str,
)
def test_one_row(case: str, extras: Sequence[str], dtype: torch.dtype) -> None:
    chosen = seed()
    made, delta = world(case, dtype, chosen)
    inputs, sizes, _ = RANKS[case]
    outputs = sum(sizes)
    generator = torch.Generator().manual_seed(chosen)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    weight = (normal(outputs, inputs) * inputs**-0.5).to(dtype).to(DEVICE)
    scale, bias = normal(inputs), normal(outputs)
    for adapter in (0, -1, 1, 2, 1):
        x, add_to = normal(1, inputs), normal(1, outputs)
        delta.rows = made.assigned([adapter], 64)
        wide = x.double()
        if "norm" in extras:
            wide = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
        expected = wide @ weight.cpu().double().t() + made.addition(wide, [adapter])
        if "gated" in extras:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        if "bias" in extras:
            expected += bias.double()
        if "add" in extras:
            expected += add_to.double()
        target = add_to.to(DEVICE, copy=True)
        norm = (scale.to(DEVICE), 1e-5) if "norm" in extras else None
        got = delta.fused(
            x.to(DEVICE),
            weight,
            bias=bias.to(DEVICE) if "bias" in extras else None,
            norm=norm,
            gated="gated" in extras,
            add_to=target if "add" in extras else None,
            dtype=torch.float32 if "wide" in extras else None,
        )
        assert "add" not in extras or got is target
        assert got.dtype == (torch.float32 if "wide" in extras else dtype)
        assert off(got, expected) < TOLERANCE[dtype]


@pytest.mark.skipif(GPU, reason="the stand-in of the compiler replaces the interpreter's launches")
@pytest.mark.parametrize("hopper", [False, True])
def test_what_layers_launch_is_compiled_ahead(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gated products of some numbers of rows need on a Hopper GPU is loaded, too: no step that is recorded can."""
    launched = collected(monkeypatch)
    forms: list[tuple[kernels.Form, bool]] = []
    loaded: list[tuple[kernels.Form, bool]] = []
    monkeypatch.setattr(kernels, "compile_ahead", lambda form, *, alone: forms.append((form, alone)))
    monkeypatch.setattr(kernels, "expand", lambda form, *, alone: loaded.append((form, alone)))
    monkeypatch.setattr(ahead.gated_tiles, "runs", lambda device: hopper)
    _, delta = world("two halves", torch.float16, 1)
    build = Build(torch.float16, DEVICE, None, everywhere(Unquantized, torch.float16, DEVICE))
    up = build.linear("gate", "up", inputs=136, outputs=(152, 152), shard=COL, gates=True)
    down = build.linear("down", inputs=136, outputs=304, shard=ROW)
    ahead.compile_ahead([(up, delta), (down, delta)], [], None, torch.float16, DEVICE)
    assert launched == ["row_shrink_kernel", "row_expand_kernel", "adapted_row_kernel"] * 2
    assert forms == [(delta.form, hopper)]
    assert loaded == [(delta.form, True)] * hopper
