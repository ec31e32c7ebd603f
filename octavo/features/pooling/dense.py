"""`Dense`: a layer of sentence-transformers applied to pooled vectors, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.features.pooling.params import DenseActivation, DenseLayer
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.models.load.weights import load_weights
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.shard import NONE

_ACTIVATIONS: Mapping[DenseActivation, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}


class Dense(nn.Module):
    """Loads its weights on construction.

    Raises:
        ModelFileError: a tensor is missing or has the wrong shape.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, layer: DenseLayer, device: torch.device) -> None:
        super().__init__()
        build = Build(torch.float32, device, None, everywhere(Unquantized, torch.float32, device))
        self.linear = build.linear("linear", inputs=layer.inputs, outputs=layer.outputs, shard=NONE, bias=layer.bias)
        self._activation = _ACTIVATIONS[layer.activation]
        load_weights(self, SafetensorsCheckpoint([Path(layer.weights)]))

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [N, inputs] to [N, outputs], float32."""
        return self._activation(self.linear(vectors))
