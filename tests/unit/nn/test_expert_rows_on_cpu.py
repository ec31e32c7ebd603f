"""The CUDA kernel of single tokens' packed experts, compiled for the CPU: which thread reads, scales and sums what.
Tests on a GPU are in oracle/test_packed_experts.py."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import cuda_on_cpu
import pytest
import torch
from quantized_kit import BNB_TABLES
from torch import Tensor

from octavo.nn.experts_spec import ClampedGate, ExpertsForm
from octavo.nn.ops import packed_expert_rows
from octavo.nn.ops.expert_weights import PackedMatrices
from octavo.nn.ops.experts import mix_reference
from octavo.nn.ops.routing import Routing
from octavo.nn.ops.tables import book_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")

CPU = torch.device("cpu")
HALF, BRAIN, WIDE = torch.float16, torch.bfloat16, torch.float32
WORDS, BYTES, E4M3, E5M2 = torch.int16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
COUNT, EPS = 4, 1e-5
LIMITS = {BRAIN: 6e-3, HALF: 2e-3}
# Dtypes of codes, scales and activations; kind, codes of a block, group, minima; hidden size and size of experts.
FORMS: dict[str, tuple[Any, ...]] = {
    "integers, groups of 128": (WORDS, HALF, BRAIN, "integers", 64, 128, False, 256, 256),
    "integers, groups of 64, minima": (WORDS, HALF, HALF, "integers", 64, 64, True, 320, 192),
    "integers, groups of 16": (WORDS, HALF, BRAIN, "integers", 16, 16, True, 64, 304),
    "integers, whole rows": (WORDS, BRAIN, BRAIN, "integers", 64, 0, False, 512, 80),
    "E2M1": (WORDS, BRAIN, BRAIN, "e2m1", 32, 32, False, 288, 128),
    "E2M1, groups of 16": (WORDS, HALF, HALF, "e2m1", 32, 16, False, 128, 64),
    "a table": (WORDS, HALF, BRAIN, "table", 16, 64, False, 320, 64),
    "a table, groups of 128": (WORDS, WIDE, BRAIN, "table", 16, 128, False, 128, 256),
    "INT8, whole rows": (BYTES, HALF, BRAIN, "integers", 64, 0, False, 336, 128),
    "INT8, groups of 32, minima": (BYTES, HALF, HALF, "integers", 64, 32, True, 128, 96),
    "E4M3, groups of 128": (E4M3, WIDE, BRAIN, "integers", 64, 128, False, 256, 384),
    "E5M2": (E5M2, WIDE, BRAIN, "integers", 64, 64, False, 64, 128),
}
OFTEN = ("integers, groups of 64, minima", "E2M1", "a table", "E4M3, groups of 128")


@pytest.fixture(autouse=True)
def emulated(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_on_cpu.EmulatedKernel, "folder", tmp_path_factory.mktemp("kernels"), raising=False)
    monkeypatch.setattr(packed_expert_rows, "Kernel", cuda_on_cpu.EmulatedKernel)
    monkeypatch.setattr(packed_expert_rows, "usable", lambda device: True)
    packed_expert_rows._kernel.cache_clear()


def random_matrices(name: str, outputs: int, inputs: int, generator: torch.Generator) -> PackedMatrices:
    stored, scales, dtype, kind, words, group, minima, *_ = FORMS[name]
    blocks = -(-inputs // (4 * words)) * words
    codes = torch.randint(-128, 128, (COUNT, outputs, 2 * blocks if stored == WORDS else inputs), generator=generator)
    codes = codes.to(torch.int8)
    if stored not in (WORDS, BYTES):
        codes &= -73  # numbers below 2
    group = group or inputs
    largest = {WORDS: 6.0, BYTES: 70.0}.get(stored, 1.0) * inputs**0.5
    factors = ((torch.rand(COUNT, -(-inputs // group), outputs, generator=generator) + 0.5) / largest).to(scales)
    least = factors * 0.5 if minima else None
    book = book_of(BNB_TABLES["nf4"], CPU) if kind == "table" else None
    return PackedMatrices(codes.view(stored), factors, least, inputs, group, words, kind, False, dtype, book)


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in FORMS]
)
@pytest.mark.parametrize("fused", [False, True], ids=["tokens", "one token with its norm"])
def test_both_products(name: str, fused: bool) -> None:
    random = torch.Generator().manual_seed(len(name))
    dtype, hidden, size = FORMS[name][2], *FORMS[name][7:]
    form = ExpertsForm(num_experts=COUNT + 2, hidden_size=hidden, size=size, own=range(1, COUNT + 1))
    if not fused:
        form = replace(form, clamped=ClampedGate(1.702, 1.0), bias=True)
    shapes = (2 * size, hidden), (hidden, size)
    gate_up, down = (random_matrices(name, *shape, random) for shape in shapes)
    biases = [torch.randn(COUNT, n, generator=random).to(dtype) if form.bias else None for n, _ in shapes]
    tokens, top_k = (1, 3) if fused else (2, 2)
    # Expert 0 is another rank's.
    experts = torch.tensor([[3, 1, 0]] if fused else [[4, 0], [1, 2]], dtype=torch.int32)
    routing = Routing(torch.rand(tokens, top_k, generator=random) + 0.1, experts)
    stream = torch.randn(tokens, hidden, generator=random)
    scale = (torch.rand(hidden, generator=random) + 0.5).to(dtype)
    x, norm, added = stream.to(dtype), None, torch.randn(tokens, hidden, generator=random).to(dtype)
    rows = x.double()
    if fused:
        x, norm, added = stream, (scale, EPS), stream
        rows = stream.double() / (stream.double().square().mean() + EPS).sqrt() * scale.double()
    assert packed_expert_rows.serves(x, norm, gate_up, form, top_k, first=True)
    inner = packed_expert_rows.gate_rows(x, norm, routing, gate_up, biases[0], 1, form)
    assert inner.dtype == dtype
    assert packed_expert_rows.serves(inner, None, down, form, top_k, first=False)
    absent = experts == 0
    inner[absent.flatten()] = float("nan")  # not written by this rank
    expected = mix_reference(
        rows,
        Routing(routing.weights.masked_fill(absent, 0.0), experts.clamp_min(1) - 1),
        *(product(one, bias) for one, bias in zip((gate_up, down), biases, strict=True)),
        replace(form, num_experts=COUNT, own=None),
    )
    expected += added.double()
    got = packed_expert_rows.sum_rows(inner, routing, down, biases[1], 1, form, torch.empty_like(added), added)
    assert off(got, expected) < LIMITS[dtype]


def product(matrices: PackedMatrices, bias: Tensor | None) -> Any:
    def multiply(expert: int, rows: Tensor) -> Tensor:
        y = rows @ matrices.values(expert).double().T
        return y if bias is None else y + bias[expert].double()

    return multiply


def test_weights_on_inputs() -> None:
    random = torch.Generator().manual_seed(0)
    form = ExpertsForm(num_experts=COUNT, hidden_size=256, size=256, on_inputs=True)
    gate_up, down = (random_matrices("integers, groups of 128", *shape, random) for shape in ((512, 256), (256, 256)))
    x = torch.randn(1, 256, generator=random).to(BRAIN)
    routing = Routing(torch.tensor([[0.3]]), torch.tensor([[2]], dtype=torch.int32))
    inner = packed_expert_rows.gate_rows(x, None, routing, gate_up, None, 0, form)
    got = packed_expert_rows.sum_rows(inner, routing, down, None, 0, form, torch.empty_like(x), None)
    expected = mix_reference(x.double(), routing, product(gate_up, None), product(down, None), form)
    assert off(got, expected) < LIMITS[BRAIN]
