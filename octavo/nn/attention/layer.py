"""An attention layer over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.nn.attention.base import AttentionBackend, AttentionSpec, RotatingBackend
from octavo.nn.step import StepInput


class PagedAttention(nn.Module):
    """Stores this step's keys and values, then attends over each row's context.

    Attributes:
        spec: what the cache's size and the backend depend on.
        cache: this layer's KV cache, of `backend.cache_shape(spec, ...)`. The worker binds it; empty until then.
    """

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.cache = torch.empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput) -> Tensor:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], to [T, num_heads, head_dim]."""
        self.backend.write(k, v, self.cache, step)
        return self.backend.attend(q, self.cache, step, self.spec)

    @property
    def rotating(self) -> RotatingBackend | None:
        """The backend, if it takes over rotation and norms of heads too."""
        return self.backend if isinstance(self.backend, RotatingBackend) else None

    def attend(self, q: Tensor, step: StepInput) -> Tensor:
        """`forward` for keys and values that are stored already."""
        return self.backend.attend(q, self.cache, step, self.spec)
