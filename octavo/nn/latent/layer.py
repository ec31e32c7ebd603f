"""A latent attention layer over a paged KV cache, and the weights that expand its latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.core.cache_groups import CacheGroup
from octavo.native.builder import ProgramBuilder
from octavo.nn.latent.base import LatentBackend, LatentNorm, LatentSpec
from octavo.nn.latent.native import NativeLatents
from octavo.nn.shard import COL, cut
from octavo.nn.step import StepInput
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes
from octavo.parallel.mesh import ALONE, Mesh


class Expansion(WeightLayer):
    """The matrix that makes each head's keys and values of a latent, in the model's dtype.

    It is not a linear layer: the absorbed form multiplies queries and outputs with its parts.

    Attributes:
        weight: [num_heads, nope_dim + value_dim, rank], this rank's heads.
    """

    def __init__(
        self, path: str, device: torch.device, dtype: torch.dtype, spec: LatentSpec, heads: int, mesh: Mesh = ALONE
    ) -> None:
        """
        Args:
            heads: of all ranks.
        """
        super().__init__(path, device)
        rows = heads * spec.expanded_dim
        self._spec = spec
        self._stored = TensorSpec((rows, spec.rank), dtype, out_dim=0, in_dim=1)
        self._index = cut(COL, 0, rows, spec.rank, mesh).index(self._stored, rows, spec.rank)
        self.weight = torch.empty(0)

    def wanted(self) -> list[Wanted]:
        return [Wanted(f"{self.path}.weight", self._stored, index=self._index)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        self.weight = owned(plain(tensors[0])).view(self._spec.num_heads, self._spec.expanded_dim, self._spec.rank)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.weight)


class PagedLatents(nn.Module):
    """Stores this step's latents, then attends over each row's context.

    Attributes:
        spec: parameters of the cache and the backend.
        path: its place in the model, in the checkpoint's names.
        cache: this layer's latents, of `backend.cache_shape(spec, ...)`. The worker binds it; empty until then.
        group: which cache group the layer belongs to; the worker sets it.
    """

    if TYPE_CHECKING:

        def __call__(
            self,
            q: Tensor,
            latents: Tensor,
            norm: LatentNorm,
            cos_sin: Tensor,
            expansion: Tensor,
            step: StepInput,
            /,
        ) -> Tensor: ...

    def __init__(self, spec: LatentSpec, backend: LatentBackend, path: str = "") -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.path = path
        self.cache = torch.empty(0)
        self.group = 0

    def keeps(self, block_size: int) -> CacheGroup:
        """Return the kind of the layer's group: blocks of latents grow with the sequence like those of keys."""
        return CacheGroup()

    def forward(
        self, q: Tensor, latents: Tensor, norm: LatentNorm, cos_sin: Tensor, expansion: Tensor, step: StepInput
    ) -> Tensor:
        """Attend with projected queries and latents, which are overwritten; see `LatentBackend`.

        Returns:
            [T, num_heads, value_dim].
        """
        step = step.of(self.group)
        self.backend.store(q, latents, norm, cos_sin, self.cache, step, self.spec)
        if step.exchange is not None:
            kept, written = step.exchange.rows(latents)
            self.cache.flatten(0, 1).index_copy_(0, written.slot_mapping, kept.to(self.cache.dtype))
        return self.backend.attend(q, latents, expansion, self.cache, step, self.spec)

    def emit(
        self,
        b: ProgramBuilder,
        queries: int,
        latents: tuple[int, int],
        output: int,
        norm: LatentNorm,
        cos_sin: Tensor,
        expansion: Tensor,
        temperature: tuple[float, int, int] | None = None,
    ) -> None:
        """Add the layer to a native program; see `NativeLatents.emit`."""
        assert isinstance(self.backend, NativeLatents)
        own = self.cache, self.group, self.spec
        self.backend.emit(b, queries, latents, output, norm, cos_sin, expansion, *own, temperature)
