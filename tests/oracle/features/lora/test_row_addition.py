"""The addition to one row in the launch of its product, against float64. Without a GPU, the CUDA kernel is compiled for
the CPU and runs with one block."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from adapters_in_blocks import World
from cuda_on_cpu import EmulatedKernel
from torch import Tensor
from torch.nn import functional as F

from octavo.features.lora.gpu import LowRankDelta
from octavo.nn.ops import ring, row16, stored_row
from octavo.nn.ops.ring import RingPlan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if HOPPER else "cpu")
PARTS = {
    "one part": (544, [80], [[3], [17], [1]]),
    "three parts": (320, [96, 48, 32], [[4, 0, 16], [0, 1, 0], [20, 8, 36]]),
    "two halves": (128, [160, 160], [[16, 2], [0, 5], [33, 33]]),
}
"""Inputs, the parts' outputs, and each adapter's ranks."""


@pytest.fixture(autouse=True)
def kernel_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    if HOPPER:
        return
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    EmulatedKernel.folder = tmp_path_factory.getbasetemp()
    monkeypatch.setattr(
        stored_row, "_kernel", lambda *given: EmulatedKernel("stored_row", *stored_row.source_of(*given))
    )
    monkeypatch.setattr(stored_row, "ring_plan", lambda form: RingPlan(4, 2, 40 << 10))
    monkeypatch.setattr(ring, "multiprocessors", lambda device: 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize(
    ("case", "operations"),
    [
        ("one part", "added"),
        ("one part", "x_float normed added"),
        ("three parts", "normed biased out_float"),
        ("three parts", ""),
        ("two halves", "normed gated"),
    ],
)
def test_an_addition_in_its_products_launch(case: str, operations: str, dtype: torch.dtype) -> None:
    inputs, sizes, ranks = PARTS[case]
    made = World(inputs, sizes, ranks, dtype=dtype, device=DEVICE, seed=torch.seed() % 1000, by_output=True)
    delta = LowRankDelta(made.pool, made.tables, made.target, made.index, 36, made.assigned([0], 8))
    wide = torch.float32 if "x_float" in operations else dtype
    weight = torch.randn(sum(sizes), inputs).div_(inputs**0.5).to(dtype)
    scale, bias = torch.rand(inputs).to(dtype), torch.randn(sum(sizes)).to(dtype)
    gated, there = "gated" in operations, partial(Tensor.to, device=DEVICE)
    for adapter in (0, -1, 1, 2, 1):
        x, stream = torch.randn(1, inputs).to(wide), torch.randn(1, sum(sizes)).to(wide)
        for own, other in zip(vars(delta.rows).values(), vars(made.assigned([adapter], 8)).values(), strict=True):
            if isinstance(own, Tensor):
                own.copy_(other)  # at the same address
        given = x.double()
        if "normed" in operations:
            given = given * (given.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale.double()
        expected = given @ weight.double().t() + made.addition(given, [adapter])
        if "biased" in operations:
            expected += bias.double()
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        target = there(stream).clone() if "added" in operations else None
        if target is not None:
            expected += stream.double()
        got = row16.row_product(
            there(x),
            there(weight),
            bias=there(bias) if "biased" in operations else None,
            norm=(there(scale), 1e-5) if "normed" in operations else None,
            gated=gated,
            add_to=target,
            dtype=torch.float32 if "out_float" in operations else None,
            joined=delta.in_product.joined,
        )
        limit = 1e-2 if dtype == torch.bfloat16 else 2e-3
        assert float((got.cpu().double() - expected).norm() / expected.norm()) < limit
        assert delta.in_product.counts.tolist() == [0, 0], "ready for the next launch"
