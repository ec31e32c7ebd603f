"""Which layers the kernels of a GPU add to; others are computed in torch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from octavo.features.lora import kernels
from octavo.features.lora.layout import Geometry, Target, TargetPart


def layer(*outputs: int, inputs: int = 64) -> Target:
    return Target("layers.0", tuple(TargetPart(str(i), inputs, n, inputs, n) for i, n in enumerate(outputs)))


def test_sizes_that_are_no_multiples_of_eight_are_not_served() -> None:
    geometry = Geometry(slices=4, slice_bytes=4096, element_size=2)
    assert kernels.serves(layer(64, 32, 32), geometry, 64)
    assert kernels.serves(layer(64, 32, 32, 64, 8, 8), geometry, 64), "as of Qwen3-Next's linear attention"
    assert not kernels.serves(layer(60), geometry, 64)
    assert not kernels.serves(layer(64, inputs=60), geometry, 64)
