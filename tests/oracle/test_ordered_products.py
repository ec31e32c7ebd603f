"""Products with one order of sums: against float64, and of any number of rows against those of each row (on a GPU)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.nn.ops import ordered
from octavo.nn.ops.products import Like
from octavo.nn.ops.triton_ordered import ordered_product

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if GPU else torch.float16
SHAPES = [(6144, 4096), (4096, 14336), (1000, 1016), (96, 64)] if GPU else [(200, 72), (96, 64)]


def made(outputs: int, inputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(outputs, inputs, device=DEVICE).mul_(inputs**-0.5).to(HALF)
    return torch.randn(rows, inputs, device=DEVICE).to(HALF), weight


@pytest.mark.parametrize("rows", [1, 5, 70, 300] if GPU else [1, 20])
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_right(shape, dtype, rows):
    x, weight = made(*shape, rows)
    expected = x.double() @ weight.double().t()
    for product in (ordered.linear, ordered_product):
        got = product(x, weight, dtype)
        assert got.dtype == dtype
        assert (got.double() - expected).abs().max() < (2e-2 if dtype == HALF else 1e-3)


@pytest.mark.skipif(not GPU, reason="the interpreter multiplies in the order of another library")
@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_rows(shape, dtype):
    x, weight = made(*shape, 4096)
    chosen = [1, 2, 9, 16, 17, 64, 256, 1000]
    ordered.choose([Like([weight], dtype)], chosen, lambda: None)
    whole = ordered_product(x, weight, dtype)
    for rows in [*chosen, 3, 33, 100, 257, 511, 777, 2048, 4096]:
        assert torch.equal(ordered.linear(x[:rows], weight, dtype), whole[:rows]), rows


class _Library:
    """In place of cuBLASLt's `Product`. Algorithm b"halves" divides the inputs."""

    tried: list[tuple[int, bytes]]

    def __init__(self, lib: Any, kind: torch.dtype, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
        self.rows = rows

    def algorithms(self, count: int) -> list[bytes]:
        return [b"halves", b"whole"]

    def takes(self, algorithm: bytes) -> bool:
        return True

    def into(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes, **_: Any) -> None:
        self.tried.append((self.rows, algorithm))
        out.copy_(ordered_product(x, weight, out.dtype))
        if algorithm == b"halves":
            out[0, 0] += 1


def test_algorithms_are_tried_once_for_rows_of_as_many_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _Library.tried = []
    monkeypatch.setattr(ordered, "Product", _Library)
    monkeypatch.setattr(ordered, "aligned", lambda *tensors: True)
    monkeypatch.setattr("octavo.nn.ops.products.aligned", lambda *tensors: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    owner = ordered.OrderedProducts(None, tmp_path / "choices")  # type: ignore[arg-type]
    x, weight = made(96, 64, 320)
    for rows in (300, 310, 320, 300):
        got = owner.run_ordered(x[:rows], weight, HALF)
        assert got is not None
        assert torch.equal(got, ordered_product(x[:rows], weight, HALF))
    assert [one for one in _Library.tried if one[1] == b"halves"] == [(320, b"halves")]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert owner.run_ordered(x[:200], weight, HALF) is None
