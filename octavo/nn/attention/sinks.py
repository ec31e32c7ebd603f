"""The sinks of attention heads, as weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes
from octavo.parallel.mesh import ALONE, Mesh


class HeadSinks(WeightLayer):
    """A score per head of a key without a value (gpt-oss; Xiao et al. 2023, https://arxiv.org/abs/2309.17453).

    Attributes:
        value: [heads of this rank] float32.
    """

    def __init__(self, path: str, device: torch.device, heads: int, mesh: Mesh = ALONE) -> None:
        """
        Args:
            heads: of this rank; all ranks have equally many.
        """
        super().__init__(path, device)
        mine = slice(mesh.rank * heads, (mesh.rank + 1) * heads)
        every = TensorSpec((heads * mesh.size,), torch.float32)
        self._wanted = Wanted(path, every, index=None if mesh.size == 1 else (mine,))
        self.value = torch.empty(0)

    def wanted(self) -> list[Wanted]:
        return [self._wanted]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        (value,) = tensors
        self.value = owned(plain(value))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.value)
