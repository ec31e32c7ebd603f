"""Matrix products against float64: chosen beforehand or not, stored or added to a stream."""

from __future__ import annotations

import os

import pytest
import torch

from octavo.nn.ops import products
from octavo.nn.ops.cublaslt import Product, library

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS, INPUTS = 512, 768
ROWS = (1, 8, 33, 256)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _seed():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    torch.manual_seed(seed)


@pytest.fixture
def unknown(monkeypatch, tmp_path):
    """Nothing is known of earlier choices, and none of these is kept."""
    monkeypatch.setenv("OCTAVO_KERNEL_CACHE", str(tmp_path))
    products.products.cache_clear()
    yield
    products.products.cache_clear()


def factors(rows: int, dtype: torch.dtype):
    x, weight = (torch.randn(count, INPUTS).to(dtype) for count in (rows, OUTPUTS))
    return x, weight, torch.randn(rows, OUTPUTS).to(dtype)


def check(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (got.cpu().double() - expected).norm() / expected.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("choosing", [False, True])
@pytest.mark.usefixtures("unknown")
def test_products_stored_and_added(rows, dtype, choosing):
    x, weight, stream = factors(rows, dtype)
    on_device = weight.to(DEVICE)
    if choosing:
        products.choose([products.Like([on_device], dtype, added=True)], [rows], lambda: None)
    expected = x.double() @ weight.double().t()
    check(products.linear(x.to(DEVICE), on_device, None), expected, dtype)
    added = stream.clone().to(DEVICE)
    products.add_linear(added, x.to(DEVICE), on_device)
    check(added, expected + stream.double(), dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.usefixtures("unknown")
def test_products_that_are_gated(rows, dtype):
    x, weight, _ = factors(rows, dtype)
    there = weight.to(DEVICE)
    products.choose([products.Like([there], dtype, gated=True)], [rows], lambda: None)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    check(products.gated(x.to(DEVICE), there), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLASLt needs a GPU")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_algorithm_for_halves(rows, dtype):
    """Which of them is chosen, and whether one is, depends on what they cost here."""
    lib = library()
    assert lib is not None
    x, weight, _ = factors(rows, dtype)
    product = Product(lib, dtype, dtype, rows, OUTPUTS, INPUTS, parts=2)
    algorithms = product.algorithms(8)
    assert algorithms
    middle = INPUTS // 2
    for algorithm in algorithms:
        assert product.takes(algorithm)
        parts = torch.full((2, rows, OUTPUTS), float("nan"), dtype=dtype, device=DEVICE)
        product.into(parts, x.to(DEVICE), weight.to(DEVICE), algorithm)
        for part, inputs in zip(parts, (slice(middle), slice(middle, None)), strict=True):
            check(part, x[:, inputs].double() @ weight[:, inputs].double().t(), dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuBLASLt needs a GPU")
@pytest.mark.usefixtures("unknown")
def test_what_is_chosen_for_halves_is_kept():
    x, weight, _ = factors(256, torch.bfloat16)
    for _ in range(2):
        like = products.Like([weight.to(DEVICE)], torch.bfloat16, added=True)
        products.choose([like], [256], lambda: None)
        owner = products.products()
        assert owner is not None
        parts = products.halves(x.to(DEVICE), weight.to(DEVICE))
        if parts is not None:
            check(parts.double().sum(0), x.double() @ weight.double().t(), torch.bfloat16)
        tried = owner.tried
        products.products.cache_clear()
    assert tried == 0
