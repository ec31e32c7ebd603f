"""Routing and experts' feed-forwards against plain loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops.experts import mix, mix_reference
from octavo.nn.ops.routing import Routing, route

EXPERTS, HIDDEN, SIZE = 12, 16, 24


def logits(tokens: int) -> Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(2))


def products(form: ExpertsForm) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (EXPERTS, (1 + form.gated) * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


def mixed(function: object, x: Tensor, routing: Routing, form: ExpertsForm) -> Tensor:
    up, down = products(form)
    y: Tensor = function(x, routing, lambda e, x: F.linear(x, up[e]), lambda e, x: F.linear(x, down[e]), form)  # type: ignore[operator]
    return y


FORMS = {
    "silu": {},
    "gelu": {"activation": "gelu_tanh"},
    "clamped": {"clamped": ClampedGate(1.7, 2.0)},
    "inputs": {"on_inputs": True},
    "plain": {"activation": "relu2", "gated": False},
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_tokens_sorted_by_expert_equal_one_at_a_time(changes: dict[str, object]) -> None:
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=SIZE, **changes)  # type: ignore[arg-type]
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3))
    routing = route(logits(9), RoutingSpec(top_k=3))
    expected = mixed(mix_reference, x, routing, form)
    torch.testing.assert_close(mixed(mix, x, routing, form), expected, rtol=1e-5, atol=1e-4)
    assert mixed(mix, x[:0], Routing(routing.weights[:0], routing.experts[:0]), form).shape == (0, HIDDEN)


def test_the_order_of_a_sum_is_the_tokens_own() -> None:
    """Large terms of opposite signs: another order would lose the small one."""
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=1, size=1)
    outputs = {0: 1e8, 5: -1e8, 9: 1.0}

    def down(expert: int, x: Tensor) -> Tensor:
        return torch.full((len(x), 1), outputs.get(expert, 0.0))

    def run(experts: list[list[int]]) -> Tensor:
        ids = torch.tensor(experts, dtype=torch.int32)
        routing = Routing(torch.ones(ids.shape), ids)
        return mix(torch.ones(len(ids), 1), routing, lambda e, x: x.expand(-1, 2), down, form)

    assert run([[0, 5, 9]]).item() == run([[9, 1, 2], [0, 5, 9], [5, 0, 1]])[1].item() == 1.0


def test_only_the_best_groups_are_chosen() -> None:
    spec = RoutingSpec(
        top_k=3, scores="sigmoid", groups=4, top_groups=2, group_score="top2", normalized=True, scaling=2
    )
    routing = route(logits(20), spec)
    assert all(len({expert // 3 for expert in row}) <= 2 for row in routing.experts.tolist())
    torch.testing.assert_close(routing.weights.sum(1), torch.full((20,), 2.0))
    best = logits(20).sigmoid().unflatten(1, (4, 3)).topk(2).values.sum(-1).topk(2).indices
    for row, groups in zip(routing.experts.tolist(), best.tolist(), strict=True):
        assert {expert // 3 for expert in row} <= set(groups)


def test_corrections_choose_experts_and_do_not_weigh_them() -> None:
    correction = torch.zeros(EXPERTS)
    correction[7] = 10.0
    routing = route(logits(8), RoutingSpec(top_k=1, scores="sigmoid", corrected=True), correction)
    assert (routing.experts == 7).all()
    torch.testing.assert_close(routing.weights[:, 0], logits(8).sigmoid()[:, 7])


def test_a_softmax_of_the_chosen_is_a_normalized_softmax() -> None:
    chosen = route(logits(8), RoutingSpec(top_k=4, scores="chosen"))
    normalized = route(logits(8), RoutingSpec(top_k=4, normalized=True))
    torch.testing.assert_close(chosen.weights, normalized.weights)
    assert torch.equal(chosen.experts, normalized.experts)
