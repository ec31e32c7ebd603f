"""Configurations of towers that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.features.media.towers.qwen3_vl import Qwen3Tower
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized


@pytest.mark.parametrize(
    ("architecture", "fields", "says"),
    [
        (
            "Qwen3VL",
            {"deepstack_visual_indexes": [8, 16, 27]},
            r"deepstack_visual_indexes=\[8, 16, 27\]; .* its 27 layers",
        ),
        ("Qwen3VL", {"deepstack_visual_indexes": [16, 8]}, "ascending numbers"),
        ("Qwen3_5", {"deepstack_visual_indexes": [8]}, r"deepstack_visual_indexes=\[8\]; Octavo supports \[\] only"),
        ("Qwen3VL", {"in_channels": 1}, "in_channels=1"),
        ("Qwen3VL", {"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"),
    ],
)
def test_fields_of_qwen3_vl(architecture: str, fields: dict[str, Any], says: str) -> None:
    config = {"architectures": [f"{architecture}ForConditionalGeneration"], "vision_config": fields}
    device = torch.device("cpu")
    build = Build(torch.float32, device, None, everywhere(Unquantized, torch.float32, device))
    with pytest.raises(ConfigError, match=says):
        Qwen3Tower(config, {}, build)
