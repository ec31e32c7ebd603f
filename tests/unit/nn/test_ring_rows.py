"""Which products of few rows take the kernel of one row: those that were measured to be faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from octavo.nn.ops import products, ring_rows, row16
from octavo.nn.ops.ring_rows import RingRows

WEIGHT = torch.randn(64, 32).bfloat16()
NARROW = torch.bfloat16


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Serve a CPU, up to 4 rows of gated products; return the rows that kernels are compiled for."""
    rows: list[int] = []

    def serves(count: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, gated: bool) -> bool:
        return count <= 4 or not gated

    def multiply(x: Tensor, weight: Tensor, *, gated: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return products.gated(x, weight) if gated else products.linear(x, weight, None, dtype)

    monkeypatch.setattr(row16, "serves_rows", serves)
    monkeypatch.setattr(row16, "rows_product", multiply)
    monkeypatch.setattr(row16, "compile_rows_ahead", lambda *args, gated, added: rows.append(args[3]))
    return rows


def choosing(known: dict[str, str], faster: bool) -> tuple[RingRows, list[int]]:
    raced: list[int] = []

    def pays(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], weights: object, rows: int) -> bool:
        raced.append(rows)
        assert torch.equal(ours(WEIGHT), theirs(WEIGHT))
        return faster

    return RingRows(known, pays), raced


def takes(ring: RingRows, rows: int, *, gated: bool = False, added: bool = False) -> bool:
    return ring.takes(torch.zeros(rows, 32, dtype=NARROW), WEIGHT, NARROW, gated=gated, added=added)


@pytest.mark.usefixtures("compiled")
def test_a_faster_kernel_takes_two_to_eight_rows_of_that_use() -> None:
    ring, raced = choosing({}, faster=True)
    assert ring.choose([WEIGHT], NARROW, products, gated=False, added=False) == 2
    assert raced == [4, 8]
    assert [takes(ring, rows) for rows in (0, 1, 2, 5, 8, 9)] == [False, False, True, True, True, False]
    assert not takes(ring, 2, gated=True)
    assert not takes(ring, 2, added=True)
    assert not ring.takes(torch.zeros(2, 32, dtype=NARROW), WEIGHT, torch.float32, gated=False, added=False)


@pytest.mark.usefixtures("compiled")
def test_rows_without_room_are_not_tried() -> None:
    ring, raced = choosing({}, faster=True)
    ring.choose([WEIGHT], NARROW, products, gated=True, added=False)
    assert raced == [4]
    assert [takes(ring, rows, gated=True) for rows in (3, 6)] == [True, False]


def test_a_choice_is_made_once(compiled: list[int]) -> None:
    known: dict[str, str] = {}
    ring, _ = choosing(known, faster=False)
    ring.begin(WEIGHT, NARROW, gated=False, added=False)
    assert compiled == [4, 8]
    ring.choose([WEIGHT], NARROW, products, gated=False, added=False)
    assert not takes(ring, 4)
    known[next(name for name in known if name.startswith("8-"))] = "ring"
    later, raced = choosing(known, faster=True)
    later.begin(WEIGHT, NARROW, gated=False, added=False)
    assert compiled == [4, 8, 8], "what was not faster is not compiled again"
    assert later.choose([WEIGHT], NARROW, products, gated=False, added=False) == 0
    assert not raced
    assert [takes(later, rows) for rows in (4, 8)] == [False, True]


@pytest.mark.usefixtures("compiled")
def test_sums_in_another_dtype_are_left_to_the_library() -> None:
    ring, raced = choosing({}, faster=True)
    assert ring.choose([WEIGHT], torch.float32, products, gated=False, added=True) == 0
    assert not raced
    assert not list(ring_rows._uses(WEIGHT, torch.float32, gated=False, added=True))
