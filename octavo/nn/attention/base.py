"""The interface of attention backends over a paged KV cache. `reference.py` is the oracle for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.nn.attention.recordable import Recordable
from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer's parameters for its backend.

    Attributes:
        scale: multiplies q·k before the softmax; normally head_dim ** -0.5.
        window: a query at position p attends to keys in (p - window, p]; None: to all of [0, p].
        chunked: the window begins at a multiple of its size instead: keys in [p // window * window, p].
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them unchanged.
        slopes: [num_heads], each head's linear bias (ALiBi, https://arxiv.org/abs/2108.12409): its scores become
            scores + slope * (key's position - query's position); None for no bias.
        sinks: each head has a further score, of a key without a value, which takes a share of the softmax (gpt-oss,
            https://arxiv.org/abs/2309.17453).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    slopes: tuple[float, ...] | None = None
    chunked: bool = False
    sinks: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether queries at different positions give the same keys the same scores, and see all of a prefix."""
        return self.window is None and self.slopes is None

    def first_visible(self, position: Any) -> Any:
        """Return the first position that queries at these positions attend to, before position 0 if the window reaches
        that far. Numbers or tensors; only for layers with a window."""
        assert self.window is not None
        return position // self.window * self.window if self.chunked else position - self.window + 1

    @property
    def token_elements(self) -> int:
        """Numbers per token that the layer computes in a step."""
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim


Norms = tuple[Tensor, Tensor, float]
"""Weights [head_dim] of the queries' and the keys' RMS norms, and their epsilon."""


class AttentionBackend(Protocol):
    """Reads and writes one layer's KV cache through block tables. Stateless: state is the cache and `step.attn`.

    Attributes:
        follows_table_rows: the backend looks up a row's block table by `step.table_rows`, if set. Required for slots on
            the device.
    """

    name: str
    follows_table_rows: bool

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor; dimension 0 is the block, so cache[b] is a whole block."""
        ...

    def prepare(self, step: StepInput, block_size: int) -> object:
        """Do the host work of a step, once for all layers; return the value of `step.attn`."""
        ...

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        """Store k and v, [T, num_kv_heads, head_dim] each, at `step.slot_mapping`."""
        ...

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute causal attention of q [T, num_heads, head_dim] over each row's context; return the same shape.

        Args:
            sinks: [num_heads] float32, if `spec.sinks`.
        """
        ...


@runtime_checkable
class BranchingBackend(AttentionBackend, Protocol):
    """A backend for drafts that branch: it reads `StepInput.unseen`, for layers without windows and linear biases."""

    def widen(self, queries: int) -> int:
        """Prepare for many steps whose rows have up to this many queries, at most 31.

        Returns:
            The most queries of a row with which `prepare` sends nothing to the device, as recorded steps require.
        """
        ...

    def move(self, caches: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy keys and values of some tokens to other cells, in all layers. All are read before any is written.

        Args:
            caches: [layers, *cache_shape], of all layers.
            sources, targets: [n] int64, cells: block id x block size + offset. A cell may be its own target.
        """
        ...


@runtime_checkable
class FusedBackend(AttentionBackend, Recordable, Protocol):
    """A backend that does all operations between a layer's two projections, and supports FP8 caches. On a GPU, unlike
    other backends, it can be recorded in a graph."""

    def rotate_and_attend(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        rounded_by: Tensor | None = None,
    ) -> Tensor:
        """Normalize (if `norms` is given) and rotate queries and keys, store keys and values, and attend.

        Args:
            qkv: [T, num_heads + 2 num_kv_heads, head_dim], the last two dimensions contiguous. Its contents are
                undefined afterwards.
            cos_sin: [max_position, head_dim] float32, as for `apply_rope`.
            scales: [2, num_kv_heads] float32, of keys and of values, for an FP8 cache: a stored number times its head's
                scale is the value.
            sinks: as for `attend`.
            rounded_by: [1] float32, the factor of results that the next product takes in E4M3; None for none.

        Returns:
            [T, num_heads, head_dim], in the dtype of `qkv`; or, if the backend rounds in its own launches, that times
            `rounded_by` in E4M3, to nearest and saturating.
        """
        ...

    def rotate_and_store(
        self,
        kv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
    ) -> None:
        """Normalize and rotate keys, and store keys and values, as `rotate_and_attend` does.

        Args:
            kv: [T, 2 num_kv_heads, head_dim], contiguous.
        """
        ...

    def attend_stored(
        self,
        q: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with rotated queries [T, num_heads, head_dim] over the cache, which has the step's keys and values;
        the other arguments and the result are as for `rotate_and_attend`."""
        ...

    def peaks(self, cache: Tensor) -> Tensor:
        """Return the largest magnitudes in a cache that is not in FP8: [2, num_kv_heads] float32, of keys and of
        values."""
        ...


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """Requirements on a backend.

    Attributes:
        kv_dtype: dtype of stored keys and values; None for `dtype`.
        block_size: tokens of a KV block.
        isa: instruction set for CPU kernels; "auto" for the best available.
        libraries: separate kernel libraries that the model needs; see `native/needs.py`.
        invariant: results must not depend on what else is in a step, to the bit.
    """

    device: torch.device
    dtype: torch.dtype
    spec: AttentionSpec
    block_size: int = 16
    isa: str = "auto"
    kv_dtype: torch.dtype | None = None
    libraries: Sequence[str] = ()
    invariant: bool = False


class BackendFactory(Protocol):
    """An entry of `select.py`: checks whether machine and layer are supported, and makes the backend."""

    @property
    def name(self) -> str: ...

    def supports(self, request: BackendRequest) -> str | None:
        """Return None if the request is supported, else the reason against it."""
        ...

    def make(self, request: BackendRequest) -> AttentionBackend: ...


def seen(unseen: Tensor, back: Tensor) -> Tensor:
    """Return whether queries attend to keys `back` places before them, by `StepInput.unseen`. They broadcast."""
    return (unseen >> back.clamp(0, 31)) & 1 == 0
