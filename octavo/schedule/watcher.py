"""`Watcher`: the seam through which a feature learns what the scheduler decides, as it decides it.

A watcher changes nothing. Each event is a call of one method, with the scheduler's own objects, which the watcher must
not keep beyond `ended`. There is a call for each decision and each planned step, none for each token; steps that are
repeated (`schedule/steady.py`) decide nothing.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.cache.cache import KVCache
from octavo.cache.prefix_tree import Node
from octavo.core.stats import EngineStats
from octavo.schedule.request import Request

if TYPE_CHECKING:
    from octavo.schedule.hooks import EngineHook
    from octavo.schedule.step_builder import StepBuilder

log = logging.getLogger(__name__)

WaitsFor = Callable[[Request], tuple[str, str]]
"""Returns the feature that makes a waiting request wait, and what for; "" and "" if none does."""


class PreemptionCause(enum.StrEnum):
    """Why a running request lost its slot and blocks."""

    KV_BLOCKS = "kv_blocks"
    """A request that ranks before it lacked blocks."""
    PRIORITY = "priority"
    """A more urgent request was admitted in its place."""
    SUSPECT = "suspect"
    """After a failed step, another request had to run alone."""
    FAILED_STEP = "failed_step"
    """Its own step failed, so that its blocks were lost."""
    PARKED = "parked"
    """The engine dropped all blocks, for a sleep or new weights."""


class Watcher:
    """What happens to requests; each method has a do-nothing default."""

    def begin(self, cache: KVCache, waits_for: WaitsFor) -> None:
        """Called once, before any request."""

    def queued(self, choices: Sequence[Request]) -> None:
        """The sequences of a new request wait."""

    def planned(self, step: StepBuilder, lacking: str, stats: EngineStats) -> None:
        """A step was planned from scratch.

        Args:
            step: its rows, and the requests that it deferred.
            lacking: what the first of the waiting requests that were not deferred lacks, of `LIMITS`; "" for nothing.
            stats: the engine's counters, without this step. The object is updated, until `forget`.
        """

    def loading(self, request: Request, tier: str, num_tokens: int) -> None:
        """A waiting request waits until a tier has loaded its first `num_tokens`; it shares `num_computed` of them."""

    def admitted(self, request: Request) -> None:
        """A request got a slot and shares `num_computed` tokens. Its own blocks are not registered yet."""

    def preempted(self, request: Request, cause: PreemptionCause, by: Request | None) -> None:
        """A running request is about to lose its slot and blocks, for the request `by` if there is one."""

    def ended(self, request: Request) -> None:
        """A request has ended, with `request.finish`."""

    def removed(self, node: Node, dropped: bool) -> None:
        """Blocks left the prefix tree: evicted, or `dropped` with all others."""

    def forget(self) -> None:
        """All counters and cached contents are reset; nothing waits or runs."""


class Watchers:
    """The watchers of all features. One that fails is logged and gets no more events; nothing else happens."""

    def __init__(self, hooks: Sequence[EngineHook], cache: KVCache) -> None:
        self._watchers = [hook.watcher for hook in hooks if hook.watcher is not None]
        if self._watchers:
            cache.tree.on_removed = self._removed
        self.tell("begin", cache, partial(_waits_for, hooks))

    def _removed(self, node: Node, dropped: bool) -> None:
        """As `tell`, and faster: a step may evict hundreds of blocks."""
        try:
            for watcher in self._watchers:
                watcher.removed(node, dropped)
        except Exception:
            log.exception("a watcher failed at an eviction; watchers get no more events")
            self._watchers = []

    def tell(self, event: str, *about: Any) -> None:
        """Call a method of each watcher."""
        for watcher in self._watchers:
            try:
                getattr(watcher, event)(*about)
            except Exception:
                log.exception("%s failed at %r and gets no more events", type(watcher).__name__, event)
                self._watchers = [one for one in self._watchers if one is not watcher]


def _waits_for(hooks: Sequence[EngineHook], request: Request) -> tuple[str, str]:
    for hook in hooks:
        if hook.name in request.spec.options and (text := hook.waits_for(request)):
            return hook.name, text
    return "", ""
