"""The interface of an attention backend: paged KV cache in, attention out. `reference.py` is the oracle of them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer, as its backend needs to know it.

    Attributes:
        scale: multiplies q·k before the softmax; normally head_dim ** -0.5.
        window: a query at position p sees keys in (p - window, p]; None sees all of [0, p].
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


Norms = tuple[Tensor, Tensor, float]
"""Weights [head_dim] of the queries' and the keys' RMS norms, and their epsilon."""


class AttentionBackend(Protocol):
    """Reads and writes one layer's KV cache through block tables. Stateless: state is the cache and `step.attn`.

    Attributes:
        follows_table_rows: a row's block table is found by `step.table_rows`, where that is set. Requests that live on
            the device need such a backend.
    """

    name: str
    follows_table_rows: bool

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; dimension 0 is the block, so that a block can be copied as cache[b]."""
        ...

    def prepare(self, step: StepInput, block_size: int) -> Any:
        """Host work done once a step; the result becomes `step.attn`."""
        ...

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        """Store k and v, [T, num_kv_heads, head_dim] each, at `step.slot_mapping`."""
        ...

    def attend(self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec) -> Tensor:
        """Causal attention of q [T, num_heads, head_dim] over each row's context; the same shape comes back."""
        ...


@runtime_checkable
class FusedBackend(AttentionBackend, Protocol):
    """A backend that does all there is between a layer's two projections, and knows caches in FP8. A row of length 0 is
    padding.

    It reads nothing of the device's on the host, so on a GPU its work can be recorded in a graph; that of others can't.
    """

    def rotate_and_attend(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
    ) -> Tensor:
        """Normalizes (if asked to) and turns queries and keys, stores keys and values, and attends.

        Args:
            qkv: [T, num_heads + 2 num_kv_heads, head_dim], the last two dimensions contiguous. What it holds
                afterwards is undefined.
            cos_sin: [max_position, head_dim] float32, as `apply_rope`.
            scales: [2, num_kv_heads] float32, of keys and of values, if the cache is in FP8: a stored number times
                its head's scale is the value.

        Returns:
            [T, num_heads, head_dim].
        """
        ...

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """Divides rows with so many queries, after so many tokens each.

        Returns:
            [2 n] int32: tiles of the rows with several queries, each a row and the first query in it; and the other
            rows, [m] int32.
        """
        ...

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """How many tiles `cut` makes at most of so many rows with several queries, and so many tokens in all."""
        ...

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> Any:
        """What becomes `step.attn` of a step that is recorded before `cut` is known, which these tensors will hold.

        What is left of them names a row without queries. No row will have more than `longest` queries.
        """
        ...

    def sharing(self) -> tuple[int, int]:
        """How many rows `StepInput.shared` may put in one group, and what its numbers of tokens are multiples of."""
        ...

    def peaks(self, cache: Tensor) -> Tensor:
        """The largest magnitudes in a cache that is not in FP8: [2, num_kv_heads] float32, of keys and of values."""
        ...


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a backend is wanted for.

    Attributes:
        kv_dtype: what keys and values are stored in; None is `dtype`.
        block_size: tokens of a KV block.
        isa: the instruction set that kernels compiled for a CPU may use; "auto" is the best there is.
        libraries: what the model needs of them beside what every model does; see `native/needs.py`.
    """

    device: torch.device
    dtype: torch.dtype
    spec: AttentionSpec
    block_size: int = 16
    isa: str = "auto"
    kv_dtype: torch.dtype | None = None
    libraries: Sequence[str] = ()


class BackendFactory(Protocol):
    """An entry of `select.py`: whether this machine and layer are supported, and how to make the backend."""

    @property
    def name(self) -> str: ...

    def supports(self, request: BackendRequest) -> str | None:
        """None if it does, else the reason why not."""
        ...

    def make(self, request: BackendRequest) -> AttentionBackend: ...
