"""`LoadedModel`: the result of reading weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.models.load.weights import LoadReport
from octavo.models.model import LayeredModel, Model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with weights.

    Attributes:
        source: the layers that it was compiled from.
        report: of the loader.
        scales: scales of an FP8 KV cache that the checkpoint has, by layer path.
    """

    model: Model
    source: LayeredModel
    report: LoadReport
    scales: dict[str, Tensor]
