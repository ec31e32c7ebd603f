"""`LoadedModel`: the result of reading weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.models.load.weights import LoadReport
from octavo.models.model import LayeredModel, Model
from octavo.nn.linear import Linear


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

    @property
    def linear_parameters(self) -> int:
        """The number of weights of linear layers."""
        layers = (layer for layer in self.source.modules() if isinstance(layer, Linear))
        return sum(part.out_features * part.in_features for layer in layers for part in layer.parts)
