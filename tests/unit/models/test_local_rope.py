"""The base of layers with a window, wherever configurations have it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.models.hf_rope import local_rope
from octavo.models.registry import spec_of
from octavo.nn.rope_spec import LinearScaling


def config(architecture: str, **changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
    more = {"architectures": [architecture], "num_hidden_layers": 4, "vocab_size": 50, "max_position_embeddings": 256}
    return {**sizes, **more, **changes}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0}}},
    ],
    ids=["old", "one set", "by layer type"],
)
def test_base_that_all_layers_share(config: dict[str, Any]) -> None:
    """OLMo 3."""
    assert local_rope({"max_position_embeddings": 128, **config}, 8, "rope_theta", 128, 500000.0).theta == 7.0


def test_base_of_its_own() -> None:
    """Gemma 3: a single set is that of the other layers."""
    config = {"max_position_embeddings": 128, "rope_local_base_freq": 5.0}
    config["rope_parameters"] = {"rope_theta": 7.0}
    assert local_rope(config, 8, "rope_local_base_freq", 128).theta == 5.0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 9.0}


@pytest.mark.parametrize("scaling", [{"rope_scaling": YARN}, {"rope_parameters": {"full_attention": YARN}}])
def test_tables_of_all_layers_reach_as_far_as_the_scaled_context(scaling: dict[str, Any]) -> None:
    """A position beyond its layer's table would be read outside of it."""
    spec = spec_of(config("Olmo3ForCausalLM", max_position_embeddings=128, sliding_window=8, **scaling))
    assert spec.max_position == 256
    assert [rope.max_position for rope in spec.ropes] == [256] * 4
    assert [rope.scaling is None for rope in spec.ropes] == [True, True, True, False]


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_layers_with_a_window_are_scaled_if_their_own_parameters_say_so(architecture: str) -> None:
    own = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    parameters = {"sliding_attention": own, "full_attention": {"rope_type": "default", "rope_theta": 9.0}}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    ropes = spec_of(config(architecture, rope_parameters=parameters, **layers)).ropes
    assert [(rope.scaling, rope.theta) for rope in ropes] == [(LinearScaling(2.0), 5.0), (None, 9.0)] * 2
