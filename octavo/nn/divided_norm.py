"""A root-mean-square norm over channels that are divided over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.norm import RMSNorm
from octavo.nn.shard import Heads
from octavo.nn.weights import TensorSpec, Wanted
from octavo.parallel.mesh import Mesh


class DividedRMSNorm(RMSNorm):
    """RMSNorm over all queries or all keys, with each rank's heads on that rank (OLMo 2, OLMoE).

    Ranks exchange the sums of squares. Where several ranks have the same kv head, all heads are on equally many, so the
    mean over the ranks' channels is the mean over all channels.
    """

    def __init__(
        self, path: str, device: torch.device, dtype: torch.dtype, heads: Heads, part: int, eps: float, mesh: Mesh
    ) -> None:
        """
        Args:
            heads: of all ranks.
            part: 0 for queries, 1 for keys.
        """
        every = heads.outputs[part]
        mine = heads.own(part, mesh)
        super().__init__(path, device, dtype, len(mine), eps)
        self._mesh = mesh
        spec = TensorSpec((every,), dtype)
        self._wanted = Wanted(f"{path}.weight", spec, index=(slice(mine.start, mine.stop),))

    @property
    def scale(self) -> None:  # type: ignore[override]  # a product alone has not the other ranks' sums
        return None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same, as a new tensor."""
        wide = x.float()
        squares = self._mesh.all_reduce(wide.square().sum(-1, keepdim=True))
        mean = squares.div_(self.size * self._mesh.size)
        return (wide * torch.rsqrt(mean.add_(self.eps)) * self.weight).to(self.dtype)

    def wanted(self) -> list[Wanted]:
        return [self._wanted]
