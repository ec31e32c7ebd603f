"""The interface of backends for latent attention over a paged KV cache. `reference.py` is the oracle for all of them.

Multi-head latent attention (MLA; DeepSeek-V2, https://arxiv.org/abs/2405.04434) keeps one vector per token and layer:
a latent, from which each head's keys and values are made by a matrix, and the rotated channels of a key that all heads
share. There are two equivalent forms:

- Expanded: multiply the latents by that matrix, and attend as usual. Cheap per pair of query and key.
- Absorbed: multiply the queries by each head's key matrix instead, attend to the latents themselves, and multiply the
  result by the value matrix. Each latent is then read once for all heads, and nothing is computed per key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """One latent attention layer's parameters for its backend.

    Attributes:
        num_heads: on this rank. All ranks keep the same latents.
        rank: channels of the latent.
        rope_dim: rotated channels of queries, and of the key that all heads share.
        nope_dim: the other channels of queries and keys.
        value_dim: channels of values.
        scale: multiplies q·k before the softmax.
    """

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float

    @property
    def width(self) -> int:
        """Numbers kept per token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Channels of a head's key and value that are made from a latent."""
        return self.nope_dim + self.value_dim

    @property
    def token_elements(self) -> int:
        """Numbers per token that the layer computes in a step: queries, what is expanded or absorbed, and outputs."""
        return self.num_heads * (self.query_dim + self.expanded_dim + self.value_dim + 2 * self.rank) + self.width


LatentNorm = tuple[Tensor, float]
"""Weight [rank] of the latents' RMS norm, and its epsilon."""


def absorbs(queries: int, length: int, spec: LatentSpec) -> bool:
    """Return whether the absorbed form takes fewer operations for a sequence's last `queries` of `length` tokens."""
    pairs = queries * length - queries * (queries - 1) // 2
    matrix = spec.rank * spec.expanded_dim
    absorbed = queries * matrix + pairs * (2 * spec.rank + spec.rope_dim)
    expanded = length * matrix + pairs * (spec.query_dim + spec.value_dim)
    return absorbed <= expanded


@runtime_checkable
class LatentBackend(Protocol):
    """Reads and writes one layer's latents through block tables. Stateless: state is the cache and `step.attn`.

    Attributes:
        follows_table_rows: the backend looks up a row's block table by `step.table_rows`, if set. Required for slots on
            the device.
    """

    name: str
    follows_table_rows: bool

    def cache_shape(self, spec: LatentSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor: [block, offset in the block, channel]."""
        ...

    def prepare(self, step: StepInput, block_size: int) -> object:
        """Do the host work of a step, once for all layers; return the value of `step.attn`."""
        ...

    def store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: LatentNorm,
        cos_sin: Tensor,
        cache: Tensor,
        step: StepInput,
        spec: LatentSpec,
    ) -> None:
        """Rotate queries, normalize and rotate latents, all in place, and store the latents at `step.slot_mapping`.

        Args:
            q: [T, num_heads, nope_dim + rope_dim], the last two dimensions contiguous. The last channels are rotated.
            latents: [T, rank + rope_dim]; the first channels are normalized, the others rotated. They may be left as
                they are if only the cache is read: `attend` does not need them, and `step.exchange` is None.
            cos_sin: [max_position, rope_dim] float32, as for `apply_rope`.
        """
        ...

    def attend(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> Tensor:
        """Compute causal attention over each row's context. Call `store` first.

        Args:
            q, latents: as `store` left them.
            expansion: [num_heads, nope_dim + value_dim, rank]: makes a head's key and value of a latent.

        Returns:
            [T, num_heads, value_dim], contiguous.
        """
        ...


def rotate_and_store(
    q: Tensor,
    latents: Tensor,
    norm: LatentNorm,
    cos_sin: Tensor,
    cache: Tensor,
    step: StepInput,
    spec: LatentSpec,
) -> None:
    """Do the work of `LatentBackend.store` in torch."""
    from octavo.nn.ops.norm import rms_norm
    from octavo.nn.ops.rope import apply_rope

    low = latents[:, : spec.rank]
    low.copy_(rms_norm(low, *norm))
    apply_rope(q[..., spec.nope_dim :], latents[:, None, spec.rank :], cos_sin, step.positions)
    cache.flatten(0, 1).index_copy_(0, step.slot_mapping, latents.to(cache.dtype))


class RowLatents:
    """The part of a `LatentBackend` on a CPU that keeps latents as rows, which torch stores."""

    def cache_shape(self, spec: LatentSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, spec.width)

    def store(
        self,
        q: Tensor,
        latents: Tensor,
        norm: LatentNorm,
        cos_sin: Tensor,
        cache: Tensor,
        step: StepInput,
        spec: LatentSpec,
    ) -> None:
        rotate_and_store(q, latents, norm, cos_sin, cache, step, spec)
