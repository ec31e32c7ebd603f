"""Which gated products take the kernel of some hundred rows: those that were measured to be faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.delta import Addition
from octavo.nn.ops import gated_tiles, nvrtc, products
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.gated_tiles import Form, GatedTiles, plan_of
from octavo.nn.quant.gpu import OnGpu

WEIGHT = torch.randn(64, 64).bfloat16() / 8
ROWS = (8, 64, 65, 128, 200, 512, 513)


def multiply(x: Tensor, weight: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
    both = F.linear(x, weight)
    return silu_mul(both if added is None else both + added[0] * (added[1] >= 0)[:, None])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Serve a CPU; return the sources that are compiled."""
    sources: list[str] = []
    monkeypatch.setattr(gated_tiles, "fits", lambda weight: True)
    monkeypatch.setattr(gated_tiles, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(gated_tiles, "product", multiply)
    monkeypatch.setattr(gated_tiles, "_kernel", lambda form: None)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda source, macros: sources.append(source))
    return sources


def choosing(known: dict[str, str], faster: Callable[[int], bool]) -> tuple[GatedTiles, list[int]]:
    raced: list[int] = []

    def pays(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], weights: object, rows: int) -> bool:
        raced.append(rows)
        assert torch.equal(ours(WEIGHT), theirs(WEIGHT))
        return faster(rows)

    return GatedTiles(known, pays), raced


def takes(tiles: GatedTiles, rows: int) -> bool:
    return tiles.takes(torch.zeros(rows, 64, dtype=torch.bfloat16), WEIGHT)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_whose_additions_are_wrong_is_not_chosen(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, weight: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if added is not None and fails:
            raise nvrtc.CudaError("the GPU's driver failed")
        return multiply(x, weight, added if added is None else (added[0], added[1].abs()))

    monkeypatch.setattr(gated_tiles, "product", wrong)
    tiles, _ = choosing({}, lambda rows: True)
    tiles.choose([WEIGHT], ROWS, products.gated)
    assert not any(takes(tiles, rows) for rows in ROWS)


@pytest.mark.usefixtures("compiled")
def test_it_takes_the_numbers_of_rows_for_which_it_is_faster() -> None:
    tiles, raced = choosing({}, lambda rows: rows != 200)
    assert tiles.choose([WEIGHT], ROWS, products.gated) == 4
    assert raced == [65, 128, 200, 512]
    assert [takes(tiles, rows) for rows in (*ROWS, 66)] == [False, False, True, True, False, True, False, False]
    assert not tiles.takes(torch.zeros(128, 64), WEIGHT)
    assert not tiles.takes(torch.zeros(128, 65, dtype=torch.bfloat16)[:, :64], WEIGHT)
    assert not tiles.takes(torch.zeros(128, 64, dtype=torch.bfloat16), WEIGHT[:32])


def test_a_choice_is_made_once(compiled: list[str]) -> None:
    known: dict[str, str] = {}
    tiles, _ = choosing(known, lambda rows: rows == 128)
    tiles.begin(WEIGHT, ROWS)
    assert len(compiled) == 4, "one and two tiles of rows, with and without an addition"
    tiles.choose([WEIGHT], ROWS, products.gated)
    later, raced = choosing(known, lambda rows: True)
    later.begin(WEIGHT, ROWS)
    assert len(compiled) == 6, "what was not faster is not compiled again"
    assert later.choose([WEIGHT], ROWS, products.gated) == 0
    assert not raced
    assert [takes(later, rows) for rows in (65, 128, 512)] == [False, True, False]


def test_matrices_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, raced = choosing({}, lambda rows: True)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda source, macros: pytest.fail("compiled"))
    tiles.begin(WEIGHT, ROWS)
    assert tiles.choose([WEIGHT], ROWS, products.gated) == 0
    assert not raced


@given(st.integers(1, 600), st.integers(1, 4000), st.integers(1, 200), st.sampled_from([78, 114, 132]))
def test_stages_of_a_plan_fit_in_shared_memory(rows: int, outputs: int, steps: int, blocks: int) -> None:
    side, tall = plan_of(rows, 8 * outputs, 64 * steps, blocks)
    form = Form(side, tall, torch.bfloat16)
    assert form.stages >= 3
    assert form.stages * form.stage + 1024 <= 227 << 10
    assert (tall == 2) == (rows > 128)


def test_last_rounds_are_full_where_tiles_can_be_chosen_so() -> None:
    assert plan_of(256, 14336, 4096, 132) == (112, 2)
    assert plan_of(128, 14336, 4096, 132) == (112, 1)


class Given(Addition):
    """An addition, known to be computable alone or not."""

    def __init__(self, value: Tensor, *, alone: bool) -> None:
        self._value, self._alone = value, alone

    def add_to(self, y: Tensor) -> None:
        y.add_(self._value)

    def alone(self) -> tuple[Tensor, Tensor] | None:
        return (self._value, torch.zeros(len(self._value), dtype=torch.int32)) if self._alone else None


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_an_addition_is_part_of_the_launch_where_it_can_be(
    alone: bool, chosen: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = OnGpu(torch.float32, torch.device("cpu"))
    scheme.weight, scheme.bias = torch.randn(12, 8), torch.randn(12) if biased else None
    launched = []

    def product(x: Tensor, weight: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        launched.append(added)
        assert added is not None
        return silu_mul(F.linear(x, weight) + added[0])

    monkeypatch.setattr(gated_tiles, "product", product)
    monkeypatch.setattr(products, "takes_tiles", lambda x, weight: chosen)
    x, value = torch.randn(5, 8), torch.randn(5, 12)
    got = scheme.gated(x, Given(value, alone=alone))
    torch.testing.assert_close(got, silu_mul(F.linear(x, scheme.weight, scheme.bias) + value))
    assert len(launched) == (alone and chosen and not biased)
