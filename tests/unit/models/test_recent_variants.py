"""What fields of recent families' configurations change, and their defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.models.mixers.spec import SelfAttention, ShortConvSpec
from octavo.models.registry import spec_of
from octavo.models.spec import PRE
from octavo.nn.rope import inverse_frequencies
from octavo.nn.rope_spec import ProportionalScaling, RopeSpec

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 50,
}


def config(architecture: str, **fields: Any) -> dict[str, Any]:
    return _TINY | {"architectures": [architecture]} | fields


def test_the_layers_of_lfm3() -> None:
    spec = spec_of(config("Lfm3ForCausalLM"))
    convolutions = [isinstance(mixer, ShortConvSpec) for mixer in spec.mixers]
    assert convolutions == [True, True, False, True, False, True]
    assert (spec.windows[2], spec.windows[4]) == (None, 256)
    assert spec.ropes[2] == RopeSpec(128, 256, 1e6, ProportionalScaling(32))
    assert spec.ropes[4] == RopeSpec(128, 256, 1e4)
    assert spec.mixers[2] == SelfAttention(gated=True, gates_heads=True)
    assert (spec.norms.after_mixer, spec.tied) == ("post_operator_norm", True)


def test_null_is_no_list_of_layer_types() -> None:
    fields = {"layer_types": None, "layer_rope_theta": None}
    assert spec_of(config("GraniteSWAForCausalLM", **fields)).windows == (None, 128, 128, 128, None, 128)
    assert spec_of(config("Lfm3ForCausalLM", layer_types=None)) == spec_of(config("Lfm3ForCausalLM"))
    command = config("Cohere2MoeForCausalLM", layer_types=None, mlp_layer_types=None)
    assert spec_of(command).windows == (4096, 4096, 4096, None, 4096, 4096)


def test_lfm3_without_its_options() -> None:
    spec = spec_of(config("Lfm3ForCausalLM", use_sandwich_norm=False, use_attention_gate=False))
    assert spec.norms == PRE
    assert spec.mixers[2] == SelfAttention()


def test_some_pairs_rotate_as_fast_as_if_all_did() -> None:
    whole = inverse_frequencies(RopeSpec(16, 32, 100.0))
    some = inverse_frequencies(RopeSpec(16, 32, 100.0, ProportionalScaling(3, factor=2.0)))
    torch.testing.assert_close(some, torch.cat([whole[:3] / 2, torch.zeros(5)]))


@pytest.mark.parametrize(
    ("fields", "scale", "logits", "after"),
    [({}, 8**-0.5, 1.0, "post_norm1"), ({"attention_multiplier": 0.1, "logits_scaling": 0.5}, 0.1, 0.5, "post_norm1")],
)
def test_multipliers_of_hyperclova_x(fields: dict[str, Any], scale: float, logits: float, after: str) -> None:
    spec = spec_of(config("HyperCLOVAXForCausalLM", **fields))
    assert (spec.scale, spec.multipliers.logits, spec.norms.after_mixer) == (scale, logits, after)
    assert spec_of(config("HyperCLOVAXForCausalLM", use_post_norm=False)).norms == PRE


@pytest.mark.parametrize("fields", [{}, {"layer_types": None, "mlp_only_layers": None}], ids=["left out", "null"])
def test_the_layers_of_flint(fields: dict[str, Any]) -> None:
    spec = spec_of(config("FlintForCausalLM", moe_intermediate_size=16, **fields))
    assert spec.windows == (None, None, 513, 513, 513, None)
    assert [rope.rotary_dim for rope in spec.ropes] == [0, 0, 128, 128, 128, 0]
    assert [type(mlp).__name__ for mlp in spec.mlps[:3]] == ["MlpSpec", "MlpSpec", "ExpertsSpec"]
    assert spec.sinks
