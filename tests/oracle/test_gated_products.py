"""Gated products of some hundred rows against float64, with inputs that differ with every run."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops import gated_tiles
from octavo.nn.ops.triton_norm import rms_norm

GPU = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def generator() -> torch.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator(GPU).manual_seed(seed)


def random(some: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=some, device=GPU).to(dtype)


def matrix(some: torch.Generator, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a matrix that is there: the launch before a product must not write it."""
    made = random(some, outputs, inputs, dtype=dtype) / inputs**0.5
    torch.cuda.synchronize()
    return made


def off(got: Tensor, x: Tensor, weight: Tensor, added: Tensor | None = None) -> float:
    both = x.double() @ weight.double().t()
    gate, up = (both if added is None else both + added).chunk(2, dim=1)
    expected = F.silu(gate) * up
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1, 65, 128, 129, 256, 300, 512])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 64), (456, 192), (1000, 1024), (14336, 448), (15000, 64)])
def test_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """More and fewer tiles than blocks, steps than stages; the last tiles of rows and outputs are not full."""
    some = generator()
    x, weight = random(some, rows, inputs, dtype=dtype), matrix(some, 2 * outputs, inputs, dtype)
    assert gated_tiles.fits(weight)
    got = gated_tiles.product(x, weight)
    assert got.shape == (rows, outputs)
    assert off(got, x, weight) < TOLERANCE[dtype]


@pytest.mark.parametrize("side", gated_tiles._SIDES)
@pytest.mark.parametrize("rows", [100, 200])
def test_each_division(side: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_tiles, "plan_of", lambda *args: (side, 1 if rows <= 128 else 2))
    some = generator()
    x, weight = random(some, rows, 512), matrix(some, 2 * 1000, 512)
    assert off(gated_tiles.product(x, weight), x, weight) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rows", [90, 260])
def test_additions_to_some_rows(rows: int) -> None:
    some = generator()
    x, added, weight = random(some, rows, 256), random(some, rows, 2 * 600), matrix(some, 2 * 600, 256)
    chosen = torch.randint(-1, 2, (rows + 5,), generator=some, device=GPU, dtype=torch.int32)
    adds = (chosen[:rows] >= 0)[:, None]
    got = gated_tiles.product(x, weight, (added.where(adds, torch.nan), chosen))
    assert off(got, x, weight, added.double() * adds) < TOLERANCE[torch.bfloat16]


def test_rows_of_the_launch_before_are_waited_for() -> None:
    """Recorded, so that launches follow one another as closely as they can."""
    some = generator()
    x, weight = random(some, 256, 4096), matrix(some, 2 * 4096, 4096)
    scale = torch.ones(4096, dtype=torch.bfloat16, device=GPU)

    def chain(x: Tensor) -> list[Tensor]:
        found = []
        for _ in range(6):
            x = gated_tiles.product(rms_norm(x, scale, 1e-5), weight)
            found.append(x)
        return found

    expected = [x]
    for _ in range(6):
        gate, up = F.linear(rms_norm(expected[-1], scale, 1e-5).float(), weight.float()).chunk(2, dim=1)
        expected.append((F.silu(gate) * up).bfloat16())
    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(20):
        for one in found:
            one.fill_(torch.nan)
        graph.replay()
        for got, wanted in zip(found, expected[1:], strict=True):
            assert float((got.float() - wanted.float()).norm() / wanted.float().norm()) < 0.05


def test_results_do_not_depend_on_other_rows_or_runs() -> None:
    some = generator()
    x, weight = random(some, 256, 1024), matrix(some, 2 * 2048, 1024)
    multiply = partial(gated_tiles.product, weight=weight)
    whole = multiply(x)
    assert torch.equal(whole, multiply(x))
    assert torch.equal(whole[:100], multiply(x[:100].contiguous()))
