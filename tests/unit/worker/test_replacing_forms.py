"""Weights of another form than the served ones are refused before anything is replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quantized_kit import EXAMPLES

from octavo.core.errors import InvalidRequestError
from octavo.models.mixers.spec import Temperature
from octavo.worker.weights import WorkerWeights


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": "llama", "quantization_config": EXAMPLES[name].settings}


def check(served: str, new: str, *, resident: bool) -> None:
    spec = Temperature(100, 0.1)  # any that has fields
    worker: Any = SimpleNamespace(
        spec=spec,
        spec_of=lambda config: spec,
        files=SimpleNamespace(config=config_of(served)),
        device=SimpleNamespace(resident=resident),
    )
    WorkerWeights(worker)._check_shape(config_of(new))


def test_recorded_steps_keep_the_kind_of_scales_of_activations() -> None:
    for served, new, says in (
        ("fp8-static", "fp8-tensor", "have dynamic scales of activations, the served ones static ones"),
        ("fp8-tensor", "fp8-static", "have static scales of activations, the served ones dynamic ones"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            check(served, new, resident=True)
        check(served, new, resident=False)
        check(served, served, resident=True)
