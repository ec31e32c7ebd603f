"""The base of layers with a window, wherever configurations have it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.models.hf_rope import local_rope


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
    assert local_rope({"max_position_embeddings": 128, **config}, 8, "rope_theta", 500000.0).theta == 7.0


def test_base_of_its_own() -> None:
    """Gemma 3: a single set is that of the other layers."""
    config = {"max_position_embeddings": 128, "rope_local_base_freq": 5.0}
    config["rope_parameters"] = {"rope_theta": 7.0}
    assert local_rope(config, 8, "rope_local_base_freq").theta == 5.0
