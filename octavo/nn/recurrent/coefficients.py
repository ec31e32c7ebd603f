"""`Coefficients`: a small tensor of a layer, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.nn.shard import Run
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes
from octavo.parallel.mesh import ALONE, Mesh


class Coefficients(WeightLayer):
    """A tensor with the layer's own name, such as a state space's decay rates.

    Attributes:
        value: float32, as stored or as `_of` makes it; of several ranks, this one's entries.
    """

    def __init__(self, path: str, device: torch.device, shape: Sequence[int], mesh: Mesh = ALONE) -> None:
        """
        Args:
            shape: of all ranks; they divide the first dimension, of heads or channels.
        """
        super().__init__(path, device)
        self._shape = tuple(shape)
        own = Run(self._shape[0]).own(mesh)
        self._index = (slice(own.start, own.stop), *map(slice, self._shape[1:])) if mesh.size > 1 else None
        self.value = torch.empty(0)

    def wanted(self) -> list[Wanted]:
        return [Wanted(self.path, TensorSpec(self._shape, torch.float32), index=self._index)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (value,) = tensors
        self.value = self._of(owned(plain(value)))

    def _of(self, stored: Tensor) -> Tensor:
        return stored

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.value)


class DecayRates(Coefficients):
    """Rates of decay, stored as logarithms of their magnitudes: `value` is -exp(stored)."""

    def _of(self, stored: Tensor) -> Tensor:
        return stored.exp_().neg_()
