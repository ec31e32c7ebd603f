"""Products of one row with 8- and 16-bit numbers by the CUDA kernel of Hopper GPUs against float64; launches that
overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from launch_kit import check_overlap
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops import few_rows, floats, fragments, one_row, row8, row16, stored_row
from octavo.nn.ops.floats import Floats
from octavo.nn.ops.ring import COLUMNS, RowForm
from octavo.nn.ops.stored_row import StoredForm
from octavo.nn.quant.online import ONLINE

CPU, GPU = torch.device("cpu"), torch.device("cuda")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
OUTPUTS, INPUTS = 4352, 1088
"""More outputs than a round of blocks computes, also if gated; an odd number of steps."""
LARGEST_BLOCK = 227 << 10
STATIC = 5 << 10


def tiled(codes: Tensor) -> Floats:
    return Floats(codes, (torch.rand(-(-codes.shape[0] // 128), -(-codes.shape[1] // 512) * 4) + 0.5).to(codes.device))


def stored(form: str, outputs: int = OUTPUTS, inputs: int = INPUTS, device: torch.device = GPU) -> Floats:
    values = torch.randn(outputs, inputs, device=device) / inputs**0.5
    scales = torch.rand(outputs, device=device) / 100 + 0.01
    return {
        "E4M3": lambda: floats.rounded(values),
        "E5M2": lambda: Floats((values * 100).to(torch.float8_e5m2), scales),
        "integers": lambda: floats.rounded(values, torch.int8),
        "tiles": lambda: tiled((values * 30).to(floats.DTYPE)),
    }[form]()


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [64, 4096, 14336, 20480])
@pytest.mark.parametrize("dtype", [floats.DTYPE, torch.bfloat16], ids=str)
def test_blocks_fit_into_shared_memory(inputs: int, gated: bool, dtype: torch.dtype) -> None:
    form, row = StoredForm(dtype, 0, torch.bfloat16, 64, inputs), RowForm(gated, True, False, False, False, False)
    _, macros, threads, shared = stored_row.source_of(form, row, stored_row.ring_plan(form))
    assert threads <= 1024
    assert macros["DEPTH"] >= 2
    assert shared + STATIC <= LARGEST_BLOCK


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [64, 4096, 8192, 14336, 20480])
@pytest.mark.parametrize("dtype", [floats.DTYPE, torch.bfloat16], ids=str)
def test_blocks_of_several_rows_fit_into_shared_memory(inputs: int, gated: bool, dtype: torch.dtype) -> None:
    form, row = StoredForm(dtype, 0, torch.bfloat16, 64, inputs), RowForm(gated, *[False] * 5)
    for rows in COLUMNS:
        if not stored_row.fits_rows(form, rows, gated=gated):
            assert gated, "others are divided"
            continue
        divided, several = stored_row.rows_form(form, rows, gated=gated), row._replace(rows=rows)
        plan = stored_row._rows_plan(divided, several)
        assert plan is not None
        _, macros, threads, shared = stored_row.source_of(divided, several, plan)
        assert threads <= 1024
        assert macros["DEPTH"] >= 2
        assert shared + several.sum_bytes + 1024 <= LARGEST_BLOCK


@on_hopper
def test_which_kernel_multiplies_a_plain_row() -> None:
    def takes(outputs: int, inputs: int, scale: torch.dtype | None, added: bool = False) -> bool:
        fused = {"scale": scale, "gated": False, "added": added}
        return one_row.takes_ring(outputs, inputs, torch.bfloat16, GPU, **fused)

    assert takes(6144, 4096, torch.bfloat16)
    assert takes(4096, 4096, None, added=True)
    assert not takes(4096, 4096, None), "behind a sum over ranks"
    assert not takes(2048, 4096, None, added=True), "held in registers"
    assert not takes(6144, 4096, torch.float32), "norms in float32"


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(OUTPUTS, INPUTS), (32, 20480), (3072, 32)])
def test_plain_matrices(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(outputs, inputs, device=GPU).div_(inputs**0.5).to(dtype)
    assert row16.serves(outputs, inputs, dtype, GPU, scale=dtype, gated=True)
    assert not row16.serves(outputs, inputs, dtype, GPU, scale=torch.float32, gated=True)
    exact, scale, bias = weight.cpu().double(), torch.rand(inputs).to(dtype), torch.randn(outputs).to(dtype)
    for residual in (dtype, torch.float32):
        x, stream = torch.randn(1, inputs).to(residual), torch.randn(1, outputs).to(residual)
        wide, norm = x.double(), (scale.to(GPU), 1e-5)
        normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale.double()
        for product in (row16.row_product, few_rows.fused_product):
            assert off(product(x.to(GPU), weight, dtype=torch.float32), wide @ exact.T) < 1e-4
            got = product(x.to(GPU), weight, bias=bias.to(GPU), norm=norm, dtype=torch.float32)
            assert off(got, normed @ exact.T + bias.double()) < 1e-4, "a row that is not narrow yet loses nothing"
            target = stream.to(GPU, copy=True)
            assert product(x.to(GPU), weight, add_to=target) is target
            assert off(target, wide @ exact.T + stream.double()) < 1e-2
            gate, up = (normed @ exact.T).chunk(2, 1)
            assert off(product(x.to(GPU), weight, norm=norm, gated=True), F.silu(gate) * up) < 1e-2


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["E4M3", "E5M2", "integers", "tiles"])
def test_numbers_as_they_are_stored(form: str, dtype: torch.dtype) -> None:
    matrix = stored(form)
    exact = matrix.values().cpu().double()
    assert row8.fits(matrix, gated=True)
    for residual in (dtype, torch.float32):
        scale, bias = torch.rand(INPUTS).to(dtype), torch.randn(OUTPUTS).to(dtype)
        x, stream = torch.randn(1, INPUTS).to(residual), torch.randn(1, OUTPUTS).to(residual)
        wide, norm = x.double(), (scale.to(GPU), 1e-5)
        normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale.double()
        got = row8.row_product(x.to(GPU), matrix, bias=bias.to(GPU), norm=norm, dtype=residual, narrow=dtype)
        assert off(got, normed @ exact.T + bias.double()) < 1e-2
        target = stream.to(GPU, copy=True)
        assert row8.row_product(x.to(GPU), matrix, add_to=target, narrow=dtype) is target
        assert off(target, wide @ exact.T + stream.double()) < 1e-2
        gate, up = (normed @ exact.T).chunk(2, 1)
        got = row8.row_product(x.to(GPU), matrix, norm=norm, gated=True, narrow=dtype)
        assert off(got, F.silu(gate) * up) < 1e-2


@on_hopper
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("form", ["E4M3", "E5M2", "integers", "tiles", "plain", "float16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(OUTPUTS, INPUTS), (512, 14336)])
def test_several_rows(form: str, rows: int, outputs: int, inputs: int) -> None:
    dtype = torch.float16 if form == "float16" else torch.bfloat16
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x[0] *= 10  # rows are scaled apart
    if form in ("plain", "float16"):
        weight = torch.randn(outputs, inputs, device=GPU).div_(inputs**0.5).to(dtype)
        exact, product = weight, partial(row16.rows_product, x.to(GPU), weight)
        assert row16.serves_rows(rows, outputs, inputs, dtype, GPU, gated=False)
        gates = row16.serves_rows(rows, outputs, inputs, dtype, GPU, gated=True)
    else:
        matrix = stored(form, outputs, inputs)
        exact, product = matrix.values(), partial(row8.rows_product, x.to(GPU), matrix, narrow=dtype)
        assert row8.serves_rows(rows, matrix, dtype)
        gates = row8.serves_rows(rows, matrix, dtype, gated=True)
        got = product(bias=bias.to(GPU), dtype=dtype)
        expected = x.double() @ exact.cpu().double().T + bias.double()
        assert max(off(one, other) for one, other in zip(got, expected, strict=True)) < 1e-2
        product = partial(product, bias=None)
    y = x.double() @ exact.cpu().double().T
    close = 1e-4 if inputs == INPUTS or dtype == torch.float32 else 1e-3
    for result, limit in ((dtype, 1e-2), (torch.float32, close)):
        assert max(off(one, other) for one, other in zip(product(dtype=result), y, strict=True)) < limit
        stream = torch.randn(rows, outputs).to(result)
        target = stream.to(GPU, copy=True)
        assert product(add_to=target, dtype=result) is target
        assert off(target, y + stream.double()) < limit
    if gates:
        gate, up = y.chunk(2, 1)
        assert off(product(gated=True, dtype=dtype), F.silu(gate) * up) < 1e-2


@on_hopper
@pytest.mark.parametrize("form", ["plain", "E4M3"])
def test_several_rows_wait_for_the_launch_before(form: str) -> None:
    """In a recorded step, a launch begins while the previous one runs."""
    size, inner = 2048, 8704
    ups, downs = [], []
    for _ in range(4):
        up, down = (
            torch.randn(2 * inner, size, device=GPU) / size**0.5,
            torch.randn(size, inner, device=GPU) / inner**0.5,
        )
        ups.append(up.bfloat16() if form == "plain" else floats.rounded(up))
        downs.append(down.bfloat16() if form == "plain" else floats.rounded(down))
    start = torch.randn(8, size, device=GPU).bfloat16()
    stream = start.clone()

    def multiply(x: Tensor, matrix: Any, **options: Any) -> Tensor:
        if form == "plain":
            return row16.rows_product(x, matrix, **options)
        return row8.rows_product(x, matrix, None, torch.bfloat16, torch.bfloat16, **options)

    def step(between: Callable[[], None]) -> None:
        stream.copy_(start)
        for up, down in zip(ups, downs, strict=True):
            inner = multiply(stream, up, gated=True)
            between()
            multiply(inner, down, add_to=stream)
            between()

    check_overlap(step, stream)


Product = Callable[..., Tensor]


@on_hopper
@pytest.mark.parametrize("form", ["fp8", "w4a16", "w8a16"])
def test_launches_that_overlap_wait_for_each_other(form: str) -> None:
    """In a recorded step, a launch begins while the previous one runs. The answers are those of launches apart."""
    size, inner = 2048, 4352
    weights = [(torch.randn(2 * inner, size, device=GPU), torch.randn(size, inner, device=GPU)) for _ in range(6)]
    pack = ONLINE[form].pack
    layers = [(pack([up.bfloat16() / size**0.5]), pack([down.bfloat16() / inner**0.5])) for up, down in weights]
    product: Product = partial(row8.row_product if form == "fp8" else fragments.row_product, narrow=torch.bfloat16)
    norm, start = (torch.ones(size, device=GPU).bfloat16(), 1e-5), torch.randn(1, size, device=GPU).bfloat16()
    stream = start.clone()

    def step(between: Callable[[], None]) -> None:
        stream.copy_(start)
        for up, down in layers:
            inner = product(stream, up, norm=norm, gated=True)
            between()
            product(inner, down, add_to=stream)
            between()

    check_overlap(step, stream)
