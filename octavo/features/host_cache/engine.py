"""`HostCache`: the engine half. It knows which pages the host has, and chooses those that make room for others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.host_cache.index import PageIndex
from octavo.features.host_cache.settings import HostCacheSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages

log = logging.getLogger(__name__)

NAME = "host_cache"
_SPARE_PART = 8
"""This part of the places is left for pages that arrive before the worker half has dropped others."""


class HostTier:
    """
    Attributes:
        index: the pages that the worker half has.
        unwanted: those that it is to drop.
        num_dropped: pages that had to go so far.
    """

    name = NAME
    deadline_s = 10.0

    def __init__(self) -> None:
        self.index = PageIndex()
        self.unwanted: list[bytes] = []
        self.num_dropped = 0

    def holds(self, page: bytes) -> bool:
        return self.index.use(page)

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        self._drop(self.index.add(pages, before))

    def not_stored(self, pages: Sequence[bytes]) -> None:
        self.unwanted += pages

    def lost(self, pages: Sequence[bytes]) -> None:
        """What one rank lacks is of no use to the others."""
        self.index.discard(pages)
        self._drop(pages)

    def resize(self, capacity: int) -> None:
        self._drop(self.index.resize(capacity))

    def clear(self) -> None:
        self._drop(self.index.clear())

    def _drop(self, pages: Sequence[bytes]) -> None:
        self.num_dropped += len(pages)
        self.unwanted += pages


class HostCache(EngineHook):
    name = NAME
    opt_in = True

    def __init__(self) -> None:
        self.tier: HostTier = HostTier()
        self._places: Future[list[Any]] | None = None
        """How many pages each rank has places for; None until they were asked, and once that is known."""

    def attach(self, pages: Pages) -> None:
        self._pages = pages

    @property
    def awaits(self) -> bool:
        return self.tier.index.capacity == 0 and self._pages.awake

    def turn(self) -> None:
        if not self._pages.awake:
            return
        if self.awaits:
            self._places = self._places or self._pages.call("places", {})
            if self._places.done():
                answer, self._places = self._places, None
                places = min(answer.result())
                self.tier.resize(places - places // _SPARE_PART)
        if self.tier.unwanted:
            gone, self.tier.unwanted = self.tier.unwanted, []
            self._pages.call("drop", {"pages": gone}).add_done_callback(partial(self._dropped, gone))

    def _dropped(self, pages: Sequence[bytes], answer: Future[list[Any]]) -> None:
        """Drop pages later if a rank could not be asked."""
        if (error := answer.exception()) is not None:
            log.error("KV blocks in the host's memory were not dropped: %s", error)
            self.tier.unwanted += pages

    def on_reset(self) -> None:
        """Also with other weights, and after a sleep, in which the model's files may have changed."""
        self.tier.clear()

    def on_weights(self) -> None:
        self.tier.clear()

    def metrics(self) -> Sequence[FeatureMetric]:
        tier = self.tier
        return (
            _metric("host_kv_blocks", "gauge", "KV blocks kept in the host's memory.", len(tier.index)),
            _metric("host_kv_blocks_most", "gauge", "Most KV blocks kept in the host's memory.", tier.index.capacity),
            _metric("host_kv_blocks_dropped", "counter", "KV blocks that left the host's memory.", tier.num_dropped),
        )


def _metric(name: str, kind: str, text: str, value: float) -> FeatureMetric:
    return FeatureMetric(name, kind, text, "", {"": value})


def build_engine(context: FeatureContext) -> HostCache | None:
    settings = context.settings_of(HostCacheSettings)
    if not settings.kv_offloading_size:
        return None
    given = f"--kv-offloading-size {settings.kv_offloading_size:g}"
    if context.whole_prompts or not context.generates:
        raise ConfigError(f"{given} is for models that generate text; {context.model_name} does not. Leave it out.")
    if not context.shares_prefixes:
        raise ConfigError(f"{given} needs prefix caching, by which kept blocks are found. Leave out one of the two.")
    return HostCache()
