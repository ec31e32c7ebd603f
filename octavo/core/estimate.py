"""`Estimate`: whether a model fits GPUs, with how much KV cache, and how fast they can be at most. Sizes in bytes, of
each GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from octavo.core.cache_fit import CacheFit
from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.gpus import CONTEXT, GRAPHS, Gpu

_USEFUL = 8192
"""Tokens of the longest request, at least, for a model to fit where no length is set."""
_AHEAD = 2
"""Steps that a GPU has in flight."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A model's weights.

    Attributes:
        count, active: of the whole model: their number, and that of those which multiply one token.
        parts: what they are of -> bytes.
        always: bytes that each step reads.
        experts: bytes of all experts; in each layer, a token reads `chosen` of `choices`.
    """

    count: int
    active: int
    parts: Mapping[str, int]
    always: int
    experts: int = 0
    chosen: int = 0
    choices: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def read(self, tokens: int) -> float:
        """Return the expected bytes that a step of this many tokens reads, if they choose experts at random."""
        if not self.experts:
            return self.always
        return self.always + self.experts * (1 - (1 - self.chosen / self.choices) ** tokens)


@dataclass(frozen=True)
class Estimate:
    """A model on GPUs of a kind.

    Attributes:
        ranks: GPUs that divide the model.
        freed, copied: by weights in the host's memory: bytes that they free, and that each step copies.
        room: bytes for all that follows.
        workspace: of the largest step.
        limits: most sequences, and tokens of a step.
        token_bytes: KV cache of a token in all layers of a cache group.
        kept: of each layer with a cache, what it keeps, and its bytes for each token, or of its state.
        max_position: longest context that the model allows.
        asked: longest request that is to fit, in tokens; None for any.
    """

    gpu: Gpu
    ranks: int
    parameters: Parameters
    freed: int
    copied: int
    room: int
    workspace: int
    limits: tuple[int, int]
    groups: Sequence[CacheGroup]
    block_size: int
    token_bytes: int
    kept: Sequence[tuple[CacheGroup, int]]
    max_position: int
    asked: int | None = None

    @property
    def weights(self) -> int:
        """Weights on the GPU."""
        return self.parameters.total - self.freed

    @property
    def cache(self) -> int:
        """Memory of the KV cache; negative if the rest does not fit."""
        return self.room - self.weights - self.workspace - GRAPHS - CONTEXT

    @cached_property
    def fit(self) -> CacheFit:
        block = self.block_size * self.token_bytes
        return CacheFit(self.groups, self.block_size, block, _AHEAD * self.limits[1], max(self.cache, 0))

    @property
    def wanted(self) -> int:
        """Tokens of the request that must fit."""
        return min(self.asked or _USEFUL, self.max_position)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits; 0 for none."""
        return max(0, self.fit.longest(self.fit.most_blocks, self.asked or self.max_position))

    @property
    def missing(self) -> int:
        """Bytes that are missing for a request of `wanted` tokens; 0 if it fits."""
        return max(0, self.fit.held(self.wanted) * self.fit.block_bytes - self.cache)

    def at_once(self, context: int) -> int:
        """Return how many requests of this many tokens are computed at once."""
        return min(self.limits[0], self.fit.most_blocks // max(1, self.fit.held(context)))

    def decode_rate(self, streams: int, context: int) -> float | None:
        """Return the most output tokens a second of streams that have this context, as reading weights, keys and
        values, products and copies of offloaded weights allow. None if the GPU's rates are unknown."""
        gpu = self.gpu
        if not gpu.bandwidth:
            return None
        cached = streams * sum(_read(kind, size, context) for kind, size in self.kept)
        reading = (self.parameters.read(streams) + cached) / gpu.bandwidth
        multiplying = 2 * streams * self.parameters.active / self.ranks / gpu.flops
        return streams / max(reading, multiplying, self._copying)

    def prompt_rate(self) -> float | None:
        """Return the most input tokens a second in steps of the most tokens, without the cost of attention. None if the
        GPU's rates are unknown."""
        if not self.gpu.bandwidth:
            return None
        tokens = self.limits[1]
        multiplying = 2 * tokens * self.parameters.active / self.ranks / self.gpu.flops
        return tokens / max(multiplying, self.parameters.read(tokens) / self.gpu.bandwidth, self._copying)

    @property
    def _copying(self) -> float:
        """Seconds that a step copies weights."""
        return self.copied / self.gpu.host_bandwidth if self.copied else 0.0


def _read(kind: CacheGroup, size: int, context: int) -> int:
    """Return the bytes that a token reads of a layer's cache; those that it writes again, too."""
    if kind.kind is GroupKind.STATE:
        return 2 * size
    return size * (min(context, kind.window) if kind.kind is GroupKind.WINDOW else context)
