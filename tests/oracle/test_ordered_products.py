"""Products with one order of sums: against float64, and of any number of rows against those of each row (on a GPU)."""

from __future__ import annotations

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
