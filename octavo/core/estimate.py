"""`Estimate`: whether a model fits devices, with how much KV cache, and how fast they can be at most. Sizes in
bytes, of each device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from octavo.core.cache_fit import CacheFit
from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.core.gpus import CONTEXT, GRAPHS, Gpu

_USEFUL = 8192
"""Tokens of the longest request, at least, for a model to fit where no length is set."""
_MOST_BLOCKS = 1 << 40
"""Blocks of a device that keeps nothing for them."""


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

    def read(self, tokens: float) -> float:
        """Return the expected bytes that a step of this many tokens reads, if they choose experts at random."""
        if not self.experts:
            return self.always
        return self.always + self.experts * (1 - math.pow(1 - self.chosen / self.choices, tokens))


@dataclass(frozen=True)
class Load:
    """What one device has of a model: a rank of a stage of a pipeline.

    Attributes:
        gpu: the device; a CPU has the memory that is free, divided by the ranks of the machine.
        on_cpu: it is the host: it needs nothing for graphs, and its steps' memory is not part of `room`.
        most_cache: bytes of the KV cache at most; None for any.
        ranks: devices that divide the work of each token.
        cache_ranks: devices that have KV blocks of their own.
        besides: weights of features, by what they are.
        block_besides: bytes that features add to each block of the KV cache.
        freed, copied: by weights in the host's memory: bytes that they free, and that each step copies.
        room: bytes for all that follows.
        workspace: of the largest step.
        limits: most sequences, and tokens of a step.
        ahead: steps in flight.
        token_bytes: KV cache of a token in all layers of a cache group.
        kept: of each layer with a cache, what it keeps, and its bytes for each token, or of its state.
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
    ahead: int = 2
    on_cpu: bool = False
    most_cache: int | None = None
    cache_ranks: int = 1
    besides: Mapping[str, int] = field(default_factory=dict)
    block_besides: int = 0

    @property
    def weights(self) -> int:
        """Weights on the device."""
        return self.parameters.total - self.freed + sum(self.besides.values())

    @property
    def cache(self) -> int:
        """Memory of the KV cache; negative if the rest does not fit."""
        if not self.on_cpu:
            return self.room - self.weights - self.workspace - GRAPHS - CONTEXT
        free = min(self.room, self.gpu.memory - self.workspace) - self.weights
        return free if self.most_cache is None else min(free, self.most_cache)

    @cached_property
    def fit(self) -> CacheFit:
        block = self.block_size * self.token_bytes + self.block_besides
        return CacheFit(self.groups, self.block_size, block, self.ahead * self.limits[1], max(self.cache, 0))

    @property
    def most_blocks(self) -> int:
        return self.fit.most_blocks if self.fit.block_bytes else _MOST_BLOCKS

    def seconds(self, rows: float, context: int) -> float:
        """Return how long a step takes at least that computes a token of requests with this context."""
        cached = rows / self.cache_ranks * sum(_read(kind, size, context) for kind, size in self.kept)
        reading = (self.parameters.read(rows) + cached) / self.gpu.bandwidth
        return max(reading, self._multiplying(rows), self._copying)

    def prompt_seconds(self, tokens: int, contexts: int) -> float:
        """Return how long a step with prompts takes at least, without the cost of attention. `contexts`: groups of
        devices that divide its tokens."""
        reading = self.parameters.read(tokens) / self.gpu.bandwidth
        return max(self._multiplying(tokens) / contexts, reading, self._copying)

    def _multiplying(self, tokens: float) -> float:
        return 2 * tokens * self.parameters.active / self.ranks / self.gpu.flops

    @property
    def _copying(self) -> float:
        """Seconds that a step copies weights."""
        return self.copied / self.gpu.host_bandwidth if self.copied else 0.0


@dataclass(frozen=True)
class Estimate:
    """A model on devices of a kind.

    Attributes:
        stages: what one rank of each stage of the pipeline has.
        max_position: longest context that the model allows.
        asked: longest request that is to fit, in tokens; None for any.
        contexts: groups of ranks that have the same layers, and divide the tokens of prompts.
        replicas: of the model, each with all of these ranks.
        neighbours: ranks of one machine.
        host_free: free memory of the host, if it is known, for weights that stay there.
    """

    stages: Sequence[Load]
    max_position: int
    asked: int | None = None
    contexts: int = 1
    replicas: int = 1
    neighbours: int = 1
    host_free: int | None = None

    def beside(self, used: int) -> Estimate:
        """Return the estimate for devices where other programs use this many bytes."""
        return replace(self, stages=[replace(load, room=load.room - used) for load in self.stages])

    @property
    def gpu(self) -> Gpu:
        return self.stages[0].gpu

    @property
    def parameters(self) -> Parameters:
        return self.stages[0].parameters

    @property
    def limits(self) -> tuple[int, int]:
        return self.stages[0].limits

    @property
    def ranks(self) -> int:
        """The number of devices."""
        return self.stages[0].ranks * self.contexts * self.replicas

    @property
    def fullest(self) -> int:
        """The number of the stage whose device has room for the fewest blocks."""
        return min(range(len(self.stages)), key=lambda i: (-self._missing(self.stages[i]), self.stages[i].most_blocks))

    @property
    def load(self) -> Load:
        """That of the fullest stage."""
        return self.stages[self.fullest]

    @property
    def wanted(self) -> int:
        """Tokens of the request that must fit."""
        return min(self.asked or _USEFUL, self.max_position)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits; 0 for none."""
        return max(0, self.load.fit.longest(self.load.most_blocks, self.asked or self.max_position))

    @property
    def missing(self) -> int:
        """Bytes of a device that are missing for a request of `wanted` tokens; 0 if it fits."""
        return self._missing(self.load)

    def _missing(self, load: Load) -> int:
        return max(0, load.fit.held(self.wanted) * load.fit.block_bytes - load.cache)

    @property
    def in_host(self) -> int:
        """Bytes of weights in the memory of one machine's host."""
        return max(load.copied for load in self.stages) * self.neighbours

    @property
    def missing_in_host(self) -> int:
        return 0 if self.host_free is None else max(0, self.in_host - self.host_free)

    @property
    def fits(self) -> bool:
        return not self.missing and not self.missing_in_host

    def at_once(self, context: int) -> int:
        """Return how many requests of this many tokens are computed at once."""
        load = self.load
        held = load.cache_ranks * (load.most_blocks // max(1, load.fit.held(context)))
        return self.replicas * min(self.limits[0], held)

    def decode_rate(self, streams: int, context: int) -> float | None:
        """Return the most output tokens a second of streams that have this context, as reading weights, keys and
        values, products and copies of offloaded weights allow. None if the device's rates are unknown.

        Stages of a pipeline compute different requests at once; one step follows the other for each.
        """
        if not self.gpu.bandwidth:
            return None
        each = streams / min(streams, self.replicas)
        turns = min(len(self.stages), each)
        seconds = [load.seconds(each / turns, context) for load in self.stages]
        return streams / max(sum(seconds), turns * max(seconds))

    def prompt_rate(self) -> float | None:
        """Return the most input tokens a second in steps of the most tokens, without the cost of attention. None if the
        device's rates are unknown."""
        if not self.gpu.bandwidth:
            return None
        tokens = self.limits[1] * self.stages[0].cache_ranks
        slowest = max(load.prompt_seconds(tokens, self.contexts) for load in self.stages)
        return self.replicas * tokens / slowest


def _read(kind: CacheGroup, size: int, context: int) -> int:
    """Return the bytes that a token reads of a layer's cache; those that it writes again, too."""
    if kind.kind is GroupKind.STATE:
        return 2 * size
    return size * (min(context, kind.window) if kind.kind is GroupKind.WINDOW else context)
