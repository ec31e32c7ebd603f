"""Additions of adapters to experts by the kernels of a GPU against float64; on the GPU or under the interpreter."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from adapters_in_blocks import Factors, drawn, put
from launches_ahead import collected
from torch import Tensor

from octavo.device.transfer import link_of
from octavo.features.lora import ahead
from octavo.features.lora.gpu_experts import KernelExperts
from octavo.features.lora.layout import Geometry, Manifest, Piece, Target, TargetPart, layout
from octavo.features.lora.tables import Batch, Tables
from octavo.nn.experts import ExpertLayer
from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops.activation import ACTIVATIONS
from octavo.nn.ops.expert_products import mix_stacked, route_on_device
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.experts import clamped_gate
from octavo.nn.ops.routing import Routing
from octavo.nn.ops.unfused_experts import mix_adding
from octavo.nn.quant.gpu_experts import StackedExperts

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies bfloat16 matrices by their bits.
DTYPES = [torch.float32, torch.bfloat16 if GPU else pytest.param(torch.float16, marks=pytest.mark.slow)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
HIDDEN, SIZE, EXPERTS, TOP_K = 72, 40, 5, 3
RANKS = [3, 20, 16]
"""The largest rank of each adapter."""
FORMS: dict[str, dict[str, Any]] = {
    "gated": {},
    "clamped, biased": {"clamped": ClampedGate(1.702, 7.0), "bias": True},
    "not gated": {"gated": False, "activation": "relu2"},
    "weights on inputs": {"on_inputs": True},
    "a rank's experts": {"own": range(1, 4)},
}


class Layer:
    """A layer of experts, and adapters that change some projections of some of them, in random blocks."""

    def __init__(self, changes: dict[str, Any], dtype: torch.dtype) -> None:
        seed = int.from_bytes(os.urandom(4), "little")
        print(f"seed {seed}")
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=SIZE, **changes)
        self.dtype = dtype
        outputs = 2 * SIZE if self.form.gated else SIZE
        self.gate_up, self.down = self.normal(EXPERTS, outputs, HIDDEN), self.normal(EXPERTS, HIDDEN, SIZE)
        self.biases = (self.normal(EXPERTS, outputs), self.normal(EXPERTS, HIDDEN)) if self.form.bias else None
        self.make_adapters()

    def normal(self, *shape: int) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * shape[-1] ** -0.5).to(self.dtype)

    def make_adapters(self) -> None:
        names = ("gate", "up") if self.form.gated else ("up",)
        first = Target("first", tuple(TargetPart(name, HIDDEN, SIZE, HIDDEN, SIZE) for name in names))
        second = Target("second", (TargetPart("down", SIZE, HIDDEN, SIZE, HIDDEN),))
        before = Target("before", (TargetPart("q", 5, 7, 5, 7),) * 3)
        targets = [before, *([first, second] * EXPERTS)]
        geometry = Geometry(3, 1536, self.dtype.itemsize, by_output=True)
        self.factors: list[dict[tuple[int, int], Factors]] = []
        placed = []
        for rank in RANKS:
            places = [(i, part) for i, target in enumerate(targets) if i for part in range(len(target.parts))]
            ranks = {place: self.rng.choice([0, 1, rank]) for place in places}
            pieces = [Piece(0, 0, 2), *(Piece(*place, rank=own) for place, own in ranks.items() if own)]
            placed.append(layout(targets, Manifest(tuple(pieces)), geometry))
            parts = {place: targets[place[0]].parts[place[1]] for place in places if ranks[place]}
            self.factors.append(
                {
                    place: drawn(part.inputs, part.outputs, ranks[place], self.generator, self.dtype)
                    for place, part in parts.items()
                }
            )
        total = sum(one.num_blocks for one in placed)
        free = self.rng.sample(range(total + 7), total)
        pool = torch.full((3, total + 7, 1536 // self.dtype.itemsize), float("nan"), dtype=self.dtype)
        link = link_of(DEVICE)
        self.tables = Tables(targets, geometry, len(RANKS) + 2, max(one.num_blocks for one in placed) + 2, link)
        for index, one in enumerate(placed):
            blocks, free = free[: one.num_blocks], free[one.num_blocks :]
            self.tables.enter(index, blocks, one)
            for place, factors in self.factors[index].items():
                put(pool, blocks, geometry, one.spans[place], *factors)
        self.batch = Batch(64, self.tables.max_adapters, link, 2)
        self.delta = KernelExperts(pool.to(DEVICE), self.tables, (first, second), 1, max(RANKS), self.batch)

    @property
    def stacked(self) -> StackedWeights:
        own = slice(self.form.owned.start, self.form.owned.stop)
        biases = (None, None) if self.biases is None else tuple(bias[own].to(DEVICE) for bias in self.biases)
        return StackedWeights(self.gate_up[own].to(DEVICE), self.down[own].to(DEVICE), *biases, self.form.owned.start)

    def routed(self, tokens: int) -> Routing:
        spec = RoutingSpec(top_k=TOP_K, on_inputs=self.form.on_inputs)
        return route_on_device(torch.randn(tokens, EXPERTS, generator=self.generator).to(DEVICE), spec)

    def expected(self, x: Tensor, routing: Routing, adapters: list[int]) -> Tensor:
        rows = []
        for token, adapter in enumerate(adapters):
            total = torch.zeros(HIDDEN, dtype=torch.float64)
            for weight, expert in zip(routing.weights[token].tolist(), routing.experts[token].tolist(), strict=True):
                if expert in self.form.owned:
                    on_inputs = self.form.on_inputs
                    given = x[token].double() * (weight if on_inputs else 1)
                    inner = self.gated(self.product(given, expert, adapter, down=False))
                    total += self.product(inner, expert, adapter, down=True) * (1 if on_inputs else weight)
            rows.append(total)
        return torch.stack(rows)

    def product(self, x: Tensor, expert: int, adapter: int, *, down: bool) -> Tensor:
        y = (self.down if down else self.gate_up)[expert].double() @ x
        if self.biases is not None:
            y += self.biases[down][expert].double()
        if adapter >= 0:
            for part, own in enumerate(y.split(HIDDEN if down else SIZE)):
                factors = self.factors[adapter].get((1 + 2 * expert + down, part))
                if factors is not None:
                    own += factors[1].double() @ (factors[0].double() @ x)
        return y

    def gated(self, inner: Tensor) -> Tensor:
        if not self.form.gated:
            return ACTIVATIONS[self.form.activation](inner)
        if self.form.clamped is not None:
            return clamped_gate(inner, self.form.clamped)
        gate, up = inner.chunk(2)
        return ACTIVATIONS[self.form.activation](gate) * up


@pytest.mark.filterwarnings(
    "ignore:(invalid|overflow)"
)  # of numpy, for rows of other ranks' experts, which are unwritten
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_adapters_add_to_both_products_of_their_tokens(
    changes: dict[str, Any], tokens: int, dtype: torch.dtype
) -> None:
    layer = Layer(changes, dtype)
    adapters = [layer.rng.randrange(-1, len(RANKS)) for _ in range(tokens)]
    layer.batch.tokens.fill(np.array(adapters, dtype=np.int32), layer.tables.rank_groups)
    x, routing = layer.normal(tokens, HIDDEN), layer.routed(tokens)
    got = mix_adding(x.to(DEVICE), routing, layer.stacked, layer.form, layer.delta)
    expected = layer.expected(x, routing, adapters)
    assert float((got.cpu().double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_a_step_without_adapters_gives_the_sum_of_the_experts() -> None:
    layer = Layer({}, torch.float32)
    layer.batch.tokens.fill(np.full(9, -1, dtype=np.int32), layer.tables.rank_groups)
    x, routing = layer.normal(9, HIDDEN).to(DEVICE), layer.routed(9)
    got = mix_adding(x, routing, layer.stacked, layer.form, layer.delta)
    torch.testing.assert_close(got, mix_stacked(x, routing, layer.stacked, layer.form))
    assert len(mix_adding(x[:0], layer.routed(0), layer.stacked, layer.form, layer.delta)) == 0


@pytest.mark.skipif(GPU, reason="the stand-in of the compiler replaces the interpreter's launches")
def test_what_experts_launch_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, launched = Layer({}, torch.float32), collected(monkeypatch)
    scheme = StackedExperts(layer.form, torch.float32, DEVICE)
    mixture = ExpertLayer("experts", DEVICE, layer.form, SIZE, scheme)
    ahead.compile_ahead([], [(mixture, layer.delta)], None, torch.float32, DEVICE)
    assert {"grouped_kernel", "expert_shrink_kernel", "expert_expand_kernel", "sum_kernel"} <= {*launched}
