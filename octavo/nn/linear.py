"""The one linear layer. Fused projections are its `parts`; storage formats are its `scheme`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.nn.quant.base import Fusing, Part, Scheme
from octavo.nn.shard import Heads, Shard
from octavo.nn.weights import Wanted, WeightLayer


class Linear(WeightLayer):
    """y = x @ W^T + b for one or several projections of the same input, computed in one multiplication.

    Attributes:
        parts: the projections in output order; a checkpoint stores each as `path.part.suffix`.
        shard: how the layer divides over devices.
        sizes: output features of each part.
    """

    def __init__(
        self, path: str, device: torch.device, parts: Sequence[Part], shard: Shard | Heads, scheme: Scheme
    ) -> None:
        super().__init__(path, device)
        self.parts = tuple(parts)
        self.shard = shard
        self.scheme = scheme
        self.sizes = [part.out_features for part in self.parts]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., sum(sizes)], the parts side by side."""
        return self.scheme.apply(x)

    def wide(self, x: Tensor) -> Tensor:
        """`forward`, in float32 where that costs little."""
        return self.scheme.wide(x)

    @property
    def fusing(self) -> Fusing | None:
        """The scheme, if it takes the neighbours of this layer into its launch."""
        return self.scheme if isinstance(self.scheme, Fusing) else None

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The output's parts, as views."""
        return y.split(self.sizes, dim=-1)

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(self._name(part, suffix), spec, blocks=self.scheme.takes_blocks and suffix == "weight")
            for part in self.parts
            for suffix, spec in self.scheme.stored(part).items()
        ]

    def _name(self, part: Part, suffix: str) -> str:
        return f"{self.path}.{part.name}.{suffix}" if self.path else f"{part.name}.{suffix}"

    def place(self, tensors: Sequence[Tensor | None]) -> None:
        source = iter(tensors)
        self.scheme.prepare([{suffix: next(source) for suffix in self.scheme.stored(part)} for part in self.parts])

    @property
    def nbytes(self) -> int:
        return self.scheme.nbytes

    def extra_repr(self) -> str:
        names = ", ".join(f"{part.name}: {part.in_features} -> {part.out_features}" for part in self.parts)
        return f"{names}, shard={self.shard}"
