"""How many layers of a model launch all of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_models import LLAMA, QWEN3

from octavo.models.decoder import CausalLM
from octavo.models.kinds import count_until_all_kinds
from octavo.models.registry import build_model, spec_of
from octavo.nn.attention.reference import ReferenceAttention

EVERY_THIRD = {"num_hidden_layers": 9, "layer_types": 3 * [*2 * ["sliding_attention"], "full_attention"]}
EVERY_THIRD |= {"sliding_window": 16, "use_sliding_window": True}


def model_of(config: dict[str, Any]) -> CausalLM:
    model = build_model(
        spec_of(config), dtype=torch.float32, device=torch.device("cpu"), attention=ReferenceAttention()
    )
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize(
    ("config", "count"),
    [(LLAMA | {"num_hidden_layers": 6}, 2), (QWEN3 | EVERY_THIRD, 4), (LLAMA | {"num_hidden_layers": 1}, 1)],
    ids=["all alike", "every third layer another", "one layer"],
)
def test_layers_are_counted_until_each_kind_has_followed_each(config: dict[str, Any], count: int) -> None:
    assert count_until_all_kinds(model_of(config).layers) == count


@pytest.mark.parametrize("change", ["scheme", "delta", "weight", "spec"])
def test_a_layer_that_differs_is_another_kind(change: str) -> None:
    model = model_of(LLAMA | {"num_hidden_layers": 6})
    layer: Any = model.layers[4]
    match change:
        case "scheme":
            layer.mlp.out.scheme = object()
        case "delta":
            layer.mixer.out.delta = object()
        case "weight":
            layer.input_norm.weight = torch.ones(3)
        case "spec":
            layer.parallel = True
    assert count_until_all_kinds(model.layers) == 6


def test_a_model_runs_few_layers_in_the_block_only() -> None:
    model = model_of(LLAMA | {"num_hidden_layers": 6})
    whole = [number for number, _ in model._running]
    with model.in_few_layers():
        assert [number for number, _ in model._running] == [0, 1, 5]
        assert [layer for _, layer in model._running] == [model.layers[i] for i in (0, 1, 5)]
    assert [number for number, _ in model._running] == whole == list(range(6))
