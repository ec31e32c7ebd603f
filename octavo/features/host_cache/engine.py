"""`HostCache`: the engine half. It knows which pages the host has, and chooses those that make room for others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from octavo.cache.tier import Tier
from octavo.core.errors import ConfigError
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.host_cache.index import Link, PageIndex
from octavo.features.host_cache.settings import HostCacheSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages

log = logging.getLogger(__name__)

NAME = "host_cache"
_SPARE_PART = 8
"""This part of the places is left for pages that arrive before the worker half has dropped others."""


class HostTier(Tier):
    """
    Attributes:
        index: the pages that the worker half has.
        unwanted: those that it is to drop.
        links: what it is to record.
        num_dropped: pages that had to go so far.
    """

    name = NAME
    deadline_s = 10.0

    def __init__(self, *, links: bool = False) -> None:
        """
        Args:
            links: the worker half records predecessors of pages, for the process after this one.
        """
        self.index = PageIndex()
        self.unwanted: list[bytes] = []
        self.links: list[Link] = []
        self._links = links
        self.num_dropped = 0

    def holds(self, page: bytes) -> bool:
        return self.index.use(page)

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        self._drop(self.index.add(pages, before))
        if self._links:
            self.links += zip(pages, before, strict=True)

    def adopt(self, ranks: Sequence[Sequence[Link]]) -> None:
        """Index the pages that each rank found at the start. Drop those that other ranks lack, or whose predecessors
        are missing."""
        everywhere = set.intersection(*({page for page, _ in rank} for rank in ranks))
        links = {page: before for page, before in ranks[0] if page in everywhere}
        whole, broken = {b""}, set[bytes]()
        for page in links:
            path = [page]
            while path[-1] in links and path[-1] not in whole and path[-1] not in broken:
                path.append(links[path[-1]])
            (whole if path[-1] in whole else broken).update(path)
        self.unwanted += {page for rank in ranks for page, _ in rank if page not in whole}
        pages = [page for page in links if page in whole]
        self._drop(self.index.add(pages, [links[page] for page in pages]))

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

    def __init__(self, *, links: bool = False) -> None:
        self.tier: HostTier = HostTier(links=links)
        self._asked: tuple[Future[list[Any]], Future[list[Any]]] | None = None
        """Each rank's number of places, and the pages that it found at the start; None before and after the calls."""

    def attach(self, pages: Pages) -> None:
        self._pages = pages

    @property
    def awaits(self) -> bool:
        return self._pages.awake and (self.tier.index.capacity == 0 or bool(self.tier.links))

    def turn(self) -> None:
        if not self._pages.awake:
            return
        if self.tier.index.capacity == 0:
            self._asked = self._asked or (self._pages.call("places", {}), self._pages.call("kept", {}))
            if all(answer.done() for answer in self._asked):
                (places, kept), self._asked = self._asked, None
                fewest = min(places.result())
                self.tier.resize(fewest - fewest // _SPARE_PART)
                self.tier.adopt([[(page, before) for page, before in rank] for rank in kept.result()])
        if self.tier.links:
            links, self.tier.links = self.tier.links, []
            self._pages.call("link", {"links": links}).add_done_callback(_linked)
        if self.tier.unwanted:
            gone, self.tier.unwanted = self.tier.unwanted, []
            self._pages.call("drop", {"pages": gone}).add_done_callback(partial(self._dropped, gone))

    def _dropped(self, pages: Sequence[bytes], answer: Future[list[Any]]) -> None:
        """Drop pages later if a rank could not be asked."""
        if (error := answer.exception()) is not None:
            log.error("failed to drop kept KV blocks: %s", error)
            self.tier.unwanted += pages

    def on_reset(self) -> None:
        """Also with other weights, and after a sleep, in which the model's files may have changed."""
        self.tier.clear()

    def on_weights(self) -> None:
        self.tier.clear()

    def metrics(self) -> Sequence[FeatureMetric]:
        tier = self.tier
        index, dropped = tier.index, tier.num_dropped
        return (
            _metric("host_kv_blocks", "gauge", "KV blocks kept in memory or files.", len(index)),
            _metric("host_kv_blocks_most", "gauge", "Most KV blocks kept in memory or files.", index.capacity),
            _metric("host_kv_blocks_dropped", "counter", "KV blocks that left memory or files.", dropped),
        )


def _linked(answer: Future[list[Any]]) -> None:
    if (error := answer.exception()) is not None:
        log.error("failed to record KV blocks, which are lost when the server ends: %s", error)


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
    return HostCache(links=settings.kv_offloading_path is not None)
