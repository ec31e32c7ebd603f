"""An activation with parameters of its own, as weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops.activation import xielu
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes

_NUMBER = TensorSpec((), torch.float32)
_WANTED = {"alpha_p": TensorSpec((1,), torch.float32), "alpha_n": TensorSpec((1,), torch.float32)}
_DEFAULTS = {"beta": 0.5, "eps": -1e-6}
"""Transformers'; they are not trained."""


class Xielu(WeightLayer):
    """xIELU (https://arxiv.org/abs/2411.13010).

    Attributes:
        curve: [4] float32: the factors of both halves, beta and epsilon; see `nn/ops/activation.py`.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, path: str, device: torch.device, stated: tuple[float, ...] = ()) -> None:
        """
        Args:
            stated: alpha_p, alpha_n, beta and epsilon, if they are not tensors of the checkpoint.
        """
        super().__init__(path, device)
        self._stated = stated
        self.curve = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        return xielu(x, self.curve)

    def wanted(self) -> list[Wanted]:
        if self._stated:
            return []
        trained = [Wanted(f"{self.path}.{name}", spec) for name, spec in _WANTED.items()]
        return [*trained, *(Wanted(f"{self.path}.{name}", _NUMBER, optional=True) for name in _DEFAULTS)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        numbers = [torch.tensor(one) for one in self._stated] or [
            torch.tensor(default) if one is None else plain(one).cpu().reshape(())
            for one, default in zip(tensors, (0.0, 0.0, *_DEFAULTS.values()), strict=True)
        ]
        positive, negative, beta, eps = numbers
        curve = torch.stack([F.softplus(positive), beta + F.softplus(negative), beta, eps])
        self.curve = owned(curve.float().to(self.device))

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.curve)
