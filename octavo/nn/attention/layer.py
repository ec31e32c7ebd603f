"""An attention layer over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octavo.core.cache_groups import CacheGroup, attending
from octavo.native.builder import ProgramBuilder
from octavo.nn.attention.base import AttentionBackend, AttentionSpec, FusedBackend, Norms
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.sinks import HeadSinks
from octavo.nn.norm import RMSNorm
from octavo.nn.step import StepInput


class PagedAttention(nn.Module):
    """Stores this step's keys and values, then attends over each row's context.

    Attributes:
        spec: parameters of the cache and the backend.
        path: its place in the model, in the checkpoint's names.
        cache: this layer's KV cache, of `backend.cache_shape(spec, ...)`. The worker binds it; empty until then.
        group: which cache group the layer belongs to; the worker sets it.
        scales: [2, num_kv_heads] float32 with an FP8 cache, see `FusedBackend`; the worker sets them too.
        sinks: a weight, if `spec.sinks`.
    """

    if TYPE_CHECKING:

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput, /) -> Tensor: ...

    def __init__(
        self, spec: AttentionSpec, backend: AttentionBackend, path: str = "", sinks: HeadSinks | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.path = path
        self.cache = torch.empty(0)
        self.group = 0
        self.scales: Tensor | None = None
        self.sinks = sinks

    @property
    def backend(self) -> AttentionBackend:
        return self._backend

    @backend.setter
    def backend(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self._fusing = backend if isinstance(backend, FusedBackend) else None  # a check takes as long as two launches

    def keeps(self, block_size: int) -> CacheGroup:
        """Return the kind of the layer's group."""
        return attending(self.spec.window)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, step: StepInput) -> Tensor:
        """Attend with q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim]; return q's shape."""
        written = step = step.of(self.group)
        if step.exchange is not None:
            k, v, written = step.exchange.keys_and_values(k, v)
        self.backend.write(k, v, self.cache, written)
        return self.backend.attend(q, self.cache, step, self.spec, self._sinks)

    def emit(
        self,
        b: ProgramBuilder,
        source: int,
        output: int,
        dtype: torch.dtype,
        norms: Norms | None,
        cos_sin: Tensor,
        temperature: tuple[float, int, int] | None = None,
        *,
        rotates_first: bool = False,
    ) -> None:
        """Add the layer to a native program; see `NativeAttention.emit`."""
        assert isinstance(self.backend, NativeAttention)
        self.backend.emit(
            b,
            source,
            output,
            dtype,
            self.cache,
            self.spec,
            norms,
            cos_sin,
            self.group,
            self._sinks,
            temperature,
            rotates_first=rotates_first,
        )

    def read(self, q: Tensor, step: StepInput) -> Tensor:
        """Attend with queries of another layer [T, num_heads, head_dim], whose keys and values of the step are those
        stored here; return q's shape."""
        step = step.of(self.group)
        if self._fusing is not None:
            return self._fusing.attend_stored(q, self.cache, self.scales, step, self.spec, self._sinks)
        return self.backend.attend(q, self.cache, step, self.spec, self._sinks)

    def emit_read(
        self, b: ProgramBuilder, source: int, output: int, dtype: torch.dtype, norm: RMSNorm | None, cos_sin: Tensor
    ) -> None:
        """Add `read` of queries to a native program, with their norm and rotation.

        Args:
            source: the buffer of queries, float32.
        """
        assert isinstance(self.backend, NativeAttention)
        norms = None if norm is None else (norm.weight, norm.weight, norm.eps)
        place = (self.cache, self.spec, norms, cos_sin, self.group, self._sinks)
        self.backend.emit(b, source, output, dtype, *place, stores=False)

    @property
    def fused(self) -> bool:
        """Whether the backend also does rotation and norms of heads; then call `rotated`."""
        return self._fusing is not None

    def rotated(
        self, qkv: Tensor, norms: Norms | None, cos_sin: Tensor, step: StepInput, rounded_by: Tensor | None = None
    ) -> Tensor:
        """Like `forward`, from projected qkv [T, num_heads + 2 num_kv_heads, head_dim], which is overwritten; with
        `rounded_by`, results may be in E4M3: see `FusedBackend.rotate_and_attend`."""
        backend = self._fusing
        if backend is None:
            raise AssertionError(f"{self.backend.name} does not rotate")
        step = step.of(self.group)
        if step.exchange is not None:
            kv, everyone = step.exchange.rows(qkv[:, self.spec.num_heads :])
            backend.rotate_and_store(kv, norms, cos_sin, self.cache, self.scales, everyone)
        spec, sinks = self.spec, self._sinks
        return backend.rotate_and_attend(qkv, norms, cos_sin, self.cache, self.scales, step, spec, sinks, rounded_by)

    @property
    def _sinks(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks.value
