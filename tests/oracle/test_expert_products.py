"""Experts' products on a GPU against float64; on the GPU or under the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_products
from octavo.nn.ops.activation import ACTIVATIONS
from octavo.nn.ops.expert_products import mix_stacked, mix_tiles, route_on_device, sort, summands, tilings_for
from octavo.nn.ops.expert_rows import add_rows, gate_rows, mix_rows
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.experts import clamped_gate, mix
from octavo.nn.ops.routing import Routing, route
from octavo.nn.quant.gpu_experts import StackedExperts

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies bfloat16 matrices by their bits.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def fresh_generator() -> torch.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


ROUTINGS = {
    "softmax": RoutingSpec(top_k=8),
    "normalized": RoutingSpec(top_k=5, normalized=True, scaling=2.5),
    "chosen": RoutingSpec(top_k=6, scores="chosen"),
    "one": RoutingSpec(top_k=1, scores="sigmoid"),
    "corrected groups": RoutingSpec(
        top_k=4, scores="sigmoid", corrected=True, groups=6, top_groups=3, group_score="top2", normalized=True
    ),
    "groups": RoutingSpec(top_k=6, groups=4, top_groups=2),
    "mixer": RoutingSpec(top_k=2, scores="mixer", jitter=0.01),
}


@pytest.mark.parametrize("spec", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("shape", [(1, 24), (21, 60)] + ([(700, 256), (5, 264)] if GPU else []), ids=str)
def test_chosen_experts_are_those_of_torch(spec: RoutingSpec, shape: tuple[int, int]) -> None:
    tokens, count = shape
    if spec.groups > 1 and count % spec.groups:
        count += spec.groups - count % spec.groups
    generator = fresh_generator()
    logits = torch.randn(tokens, count, generator=generator)
    correction = torch.randn(count, generator=generator) if spec.corrected else None
    expected = route(logits, spec, correction)
    got = route_on_device(logits.to(DEVICE), spec, None if correction is None else correction.to(DEVICE))
    assert torch.equal(got.experts.cpu(), expected.experts)
    torch.testing.assert_close(got.weights.cpu(), expected.weights)
    if got.counts is not None:
        found = got.counts.sum(0)[:count].cpu()
        assert torch.equal(found, torch.bincount(expected.experts.flatten(), minlength=count).int())


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter's numpy
def test_no_logits_choose_an_expert_that_is_not_there() -> None:
    """A row of NaN or infinities gives distinct experts, so that nothing outside of the weights is read."""
    logits = torch.full((3, 6), float("nan"))
    logits[1], logits[2, :5] = float("-inf"), float("inf")
    for spec in (RoutingSpec(top_k=4), RoutingSpec(top_k=4, scores="sigmoid", groups=2, top_groups=2)):
        for rows in (logits, *logits.split(1)):
            experts = route_on_device(rows.to(DEVICE), spec).experts.cpu()
            assert all(len({*row}) == 4 and min(row) >= 0 and max(row) < 6 for row in experts.tolist())


@pytest.mark.parametrize("spec", [ROUTINGS["softmax"], ROUTINGS["chosen"]], ids=["softmax", "chosen"])
def test_a_token_alone_has_the_experts_that_it_has_among_others(spec: RoutingSpec) -> None:
    """Of experts with equal logits, both forms of the choice take the first ones."""
    logits = torch.randint(0, 4, (7, 20), generator=fresh_generator()).float().to(DEVICE)
    together = route_on_device(logits, spec)
    for i, row in enumerate(logits.split(1)):
        alone = route_on_device(row, spec)
        assert torch.equal(alone.experts[0], together.experts[i])
        torch.testing.assert_close(alone.weights[0], together.weights[i])


SORTED = [(21, 3, 7, 0, 7), (3, 6, 12, 4, 5), (1, 4, 4, 0, 4), (20, 1, 1, 0, 1), (301, 8, 16, 0, 16)]
SORTED += [(77, 2, 40, 10, 20), (8192, 8, 128, 0, 128), (4001, 6, 300, 100, 90)] if GPU else [(77, 2, 40, 10, 20)]


@pytest.mark.parametrize("few_chunks", [0, 10**6], ids=["two launches", "one launch"])
@pytest.mark.parametrize(("tokens", "top_k", "count", "begin", "owned"), SORTED)
def test_choices_are_sorted_by_expert_and_token(
    tokens: int, top_k: int, count: int, begin: int, owned: int, few_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_products, "_FEW_CHUNKS", few_chunks)
    generator = fresh_generator()
    experts = torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]).int()
    stacked = StackedWeights(torch.empty(owned, 0), torch.empty(owned, 0), begin=begin)
    form = ExpertsForm(num_experts=count, hidden_size=1, size=1)
    routing = Routing(torch.empty(tokens, top_k, device=DEVICE), experts.to(DEVICE))
    order, tiles = (one.cpu() for one in sort(routing, stacked, form, 4))
    flat = experts.flatten()
    mine = [choice for choice in flat.argsort(stable=True).tolist() if begin <= flat[choice] < begin + owned]
    assert order[: len(mine)].tolist() == mine
    found: list[int] = []
    for expert, start, rows in tiles.tolist():
        assert 0 <= rows <= 4
        found += range(start, start + rows)
        assert (flat[order[start : start + rows].long()] == begin + expert).all()
    assert sorted(found) == [*range(len(mine))]


def activated(inner: Tensor, form: ExpertsForm) -> Tensor:
    if form.clamped:
        return clamped_gate(inner, form.clamped)
    if not form.gated:
        return ACTIVATIONS[form.activation](inner)
    gate, up = inner.chunk(2, dim=-1)
    return ACTIVATIONS[form.activation](gate) * up


class Case:
    """Random weights and tokens, with the sum of the chosen experts in float64."""

    def __init__(self, tokens: int, count: int, hidden: int, size: int, dtype: torch.dtype, **changes: Any) -> None:
        generator = fresh_generator()

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.form = ExpertsForm(num_experts=count, hidden_size=hidden, size=size, **changes)
        bias, outputs = self.form.bias, 2 * size if self.form.gated else size
        self.stacked = StackedWeights(
            (normal(count, outputs, hidden) * hidden**-0.5).to(DEVICE),
            (normal(count, hidden, size) * size**-0.5).to(DEVICE),
            normal(count, outputs).to(DEVICE) if bias else None,
            normal(count, hidden).to(DEVICE) if bias else None,
        )
        self.x, self.added = normal(tokens, hidden).to(DEVICE), normal(tokens, hidden).to(DEVICE)
        self.generator = generator

    def routed(self, top_k: int) -> Routing:
        logits = torch.randn(len(self.x), self.form.num_experts, generator=self.generator)
        return route_on_device(logits.to(DEVICE), RoutingSpec(top_k=top_k, normalized=True))

    def expected(self, routing: Routing, owned: range | None = None) -> Tensor:
        form, total = self.form, self.added.double().clone()
        for expert in owned or range(form.num_experts):
            token, slot = (routing.experts == expert).nonzero().unbind(1)
            factor = routing.weights[token, slot, None].double()
            x = self.x[token].double() * (factor if form.on_inputs else 1.0)
            inner = x @ self.stacked.gate_up[expert].double().T
            if self.stacked.gate_up_bias is not None:
                inner += self.stacked.gate_up_bias[expert].double()
            y = activated(inner, form) @ self.stacked.down[expert].double().T
            if self.stacked.down_bias is not None:
                y += self.stacked.down_bias[expert].double()
            total.index_add_(0, token, y * (1.0 if form.on_inputs else factor))
        return total

    def check(self, got: Tensor, expected: Tensor) -> None:
        assert got.dtype == self.x.dtype
        error = (got.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[got.dtype]


FORMS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu": {"activation": "gelu_tanh"},
    "exact gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "clamped": {"clamped": ClampedGate(1.702, 1.0), "bias": True},
    "inputs": {"on_inputs": True},
    "no gates": {"gated": False, "activation": "relu2", "bias": True},
}
# tokens, experts, hidden_size, size
SHAPES = [(5, 4, 40, 24), (10, 3, 16, 17)]
LARGE = [(1, 128, 2048, 768), (16, 60, 2048, 1408), (300, 128, 2048, 768), (1000, 8, 1000, 500)]
LARGE += [(5000, 32, 1024, 256), (3000, 8, 448, 320)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + (LARGE if GPU else []), ids=str)
@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_both_forms_of_the_products(changes: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not GPU and dtype == torch.float16 and changes:
        return  # the interpreter is slow, and rounds every form alike
    case = Case(*shape, dtype, **changes)
    routing = case.routed(min(shape[1], 8) if shape[0] == 300 else 3)
    expected = case.expected(routing)
    if shape[0] <= 40:
        case.check(mix_rows(case.x, routing, case.stacked, case.form, case.added), expected)
    tilings = tilings_for(case.x, routing.experts.shape[1], case.stacked, case.form)
    case.check(mix_tiles(case.x, routing, case.stacked, case.form, tilings, case.added).total(), expected)
    if not GPU:
        turned = tuple(one._replace(turned=not one.turned, copies=False, copies_rows=False) for one in tilings)
        case.check(mix_tiles(case.x, routing, case.stacked, case.form, turned, case.added).total(), expected)


@pytest.mark.parametrize("form", ["silu", "clamped", "inputs", "no gates"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_with_norm_and_residual_sum(form: str, dtype: torch.dtype) -> None:
    case = Case(1, 12, *((2048, 768) if GPU else (40, 24)), dtype, **FORMS[form])
    routing, hidden = case.routed(3), case.form.hidden_size
    stream = torch.randn(1, hidden, generator=case.generator).to(DEVICE)
    norm = (torch.rand(hidden, generator=case.generator) + 0.5).to(DEVICE, dtype)
    inner = gate_rows(stream, (norm, 1e-5), routing, case.stacked, case.form)
    wide = stream.double()
    case.x, case.added = wide / (wide.square().mean() + 1e-5).sqrt() * norm.double(), wide
    expected = case.expected(routing)
    for residual in (stream.to(dtype, copy=True), stream):
        add_rows(inner, routing, case.stacked, case.form, residual)
        error = (residual.double() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [4, 37])
@pytest.mark.parametrize("spread", ["one", "two", "last"])
def test_experts_without_tokens(tokens: int, spread: str) -> None:
    """One expert takes everything, or a few."""
    case = Case(tokens, 9, 32, 16, torch.float32)
    choices = {"one": [4], "two": [0, 7], "last": [8]}[spread]
    experts = torch.tensor([choices] * tokens, dtype=torch.int32, device=DEVICE)
    routing = Routing(torch.rand(experts.shape, generator=case.generator).to(DEVICE), experts)
    got = mix_stacked(case.x, routing, case.stacked, case.form, case.added)
    case.check(got, case.expected(routing))


@pytest.mark.parametrize("tokens", [1, 3, 24])
def test_experts_of_others_add_nothing(tokens: int) -> None:
    """Nor are their results read: memory that nothing has written is NaN here."""
    case = Case(tokens, 10, 32, 16, torch.float32)
    routing = case.routed(4)
    own = StackedWeights(case.stacked.gate_up[3:8].contiguous(), case.stacked.down[3:8].contiguous(), begin=3)
    torch.use_deterministic_algorithms(True)
    try:
        got = mix_stacked(case.x, routing, own, case.form, case.added)
    finally:
        torch.use_deterministic_algorithms(False)
    case.check(got, case.expected(routing, range(3, 8)))


@pytest.mark.parametrize("residual", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("added", [True, False])
def test_sums_in_the_launch_of_the_next_norm(residual: torch.dtype, added: bool) -> None:
    case = Case(9, 6, 40, 16, torch.float16)
    routing = case.routed(3)
    y = summands(case.x, routing, case.stacked, case.form, case.added if added else None)
    assert not isinstance(y, Tensor)
    stream = torch.randn(9, 40, generator=case.generator).to(DEVICE, residual)
    norm = (torch.rand(40, generator=case.generator) + 0.5).to(DEVICE, torch.float16)
    expected = case.expected(routing) + stream.double() - (0 if added else case.added.double())
    got = y.normed_with(stream, (norm, 1e-5), torch.float16)
    normed = expected / (expected.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.double()
    assert got.dtype == torch.float16
    assert (got.double() - normed).norm() / normed.norm() < TOLERANCE[torch.float16]
    assert (stream.double() - expected).norm() / expected.norm() < TOLERANCE[torch.float16]


@pytest.mark.parametrize("tokens", [2, 20])
def test_no_tokens_and_tokens_of_a_batch(tokens: int) -> None:
    """A token's result is the same, on a GPU bit for bit, wherever it is in a batch of the same size."""
    case = Case(tokens, 6, 32, 16, torch.float32)
    routing = case.routed(2)
    whole = mix_stacked(case.x, routing, case.stacked, case.form)
    turn = torch.randperm(tokens, generator=case.generator).to(DEVICE)
    turned = Routing(routing.weights[turn], routing.experts[turn])
    got = mix_stacked(case.x[turn], turned, case.stacked, case.form)
    # The interpreter's library multiplies the last rows of a matrix in another order.
    assert torch.equal(got, whole[turn]) if GPU or tokens == 2 else torch.allclose(got, whole[turn], atol=1e-5)
    empty = Routing(routing.weights[:0], routing.experts[:0])
    assert mix_stacked(case.x[:0], empty, case.stacked, case.form).shape == (0, 32)


@pytest.mark.parametrize("changes", [{}, {"clamped": ClampedGate(1.702, 1.0), "bias": True}], ids=["plain", "biases"])
def test_single_experts_give_the_sum_of_all(changes: dict[str, Any]) -> None:
    case = Case(9, 6, 40, 16, torch.float32, **changes)
    routing, form, stacked = case.routed(3), case.form, case.stacked
    scheme = StackedExperts(form, torch.float32, DEVICE)
    scheme.gate_up, scheme.down = stacked.gate_up, stacked.down
    scheme.gate_up_bias, scheme.down_bias = stacked.gate_up_bias, stacked.down_bias
    got = mix(case.x, routing, scheme.gate_up_of, scheme.down_of, form) + case.added
    case.check(got, case.expected(routing))
