"""Weights of another form than the served ones are refused before anything is replaced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_kit import codes_of
from torch import nn

pytest.importorskip("triton")

from octavo.core.errors import InvalidRequestError
from octavo.nn.experts import ExpertLayer
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.linear import Linear
from octavo.nn.quant.base import Part
from octavo.nn.quant.gpu_packed_experts import PackedStack
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.shard import NONE
from octavo.worker.weights import WorkerWeights

CPU = torch.device("cpu")


def model(*scales: float | None) -> nn.Module:
    """A model of layers with E4M3 weights, and these static scales of activations."""
    layers = []
    for number, scale in enumerate(scales):
        layer = Linear(
            f"layers.{number}", CPU, [Part("down", 48, 64)], NONE, PackedOnGpu(torch.float32, CPU, rounds=True)
        )
        blocks = codes_of("e4m3", 0, 64, 48)
        if scale is not None:
            object.__setattr__(blocks, "input_scale", lambda scale=scale: scale)
        layer.place([blocks])
        layers.append(layer)
    return nn.ModuleList(layers)


def check(served: nn.Module | None, new: nn.Module, *, resident: bool = True) -> None:
    device = SimpleNamespace(resident=resident)
    worker: Any = SimpleNamespace(model=served, weight_form="float32", form_of=lambda model: "float32", device=device)
    loaded: Any = SimpleNamespace(model=new, source=new)
    WorkerWeights(worker)._check_form(loaded)


@pytest.mark.parametrize(
    ("served", "new", "says"),
    [
        (
            (0.5, 0.5),
            (0.5, None),
            "layers.1 would be stored as 8-bit floats, but the served ones are 8-bit floats, static",
        ),
        (
            (None, None),
            (0.5, None),
            "layers.0 would be stored as 8-bit floats, static inputs, but the served ones are 8",
        ),
    ],
)
def test_recorded_steps_keep_the_kind_of_scales_of_activations(served: Any, new: Any, says: str) -> None:
    """Whatever the configuration says about layers."""
    with pytest.raises(InvalidRequestError, match=says):
        check(model(*served), model(*new))
    check(model(*served), model(*new), resident=False)


def test_weights_of_the_same_form_are_taken() -> None:
    check(model(0.5, None), model(0.25, None))
    check(None, model(0.5))


def experts(group: int, *, tiled: bool) -> nn.Module:
    """A model of an expert with E4M3 weights, whose scales are those of tiles or of outputs."""
    form = ExpertsForm(num_experts=1, hidden_size=256, size=256)
    scheme = PackedStack(form, torch.bfloat16, CPU, rounds=True)
    blocks = codes_of("e4m3", group, 256, 256)
    if tiled:
        blocks = replace(blocks, scales=blocks.scales[::128].repeat_interleave(128, 0))
    scheme.prepare(0, [{"weight": blocks}] * 2, [{"weight": blocks}])
    return nn.ModuleList([ExpertLayer("layers.0.experts", CPU, form, form.size, scheme)])


@pytest.mark.parametrize("new", [{"group": 128, "tiled": False}, {"group": 64, "tiled": False}], ids=str)
def test_experts_keep_their_form(new: Any) -> None:
    """Kernels take one scale for all of a tile, which others have too many of."""
    served = experts(128, tiled=True)
    with pytest.raises(InvalidRequestError, match=r"experts of layers\.0\.experts would be stored in another form"):
        check(served, experts(**new))
    check(served, experts(128, tiled=True))
