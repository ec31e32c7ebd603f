from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.cache.tier import Tier
from octavo.core.futures import mapped
from octavo.features import FeatureContext
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages

INDEX: set[bytes] = set()


class ShelfTier(Tier):
    name = "shelf"
    deadline_s = 60.0

    def holds(self, page: bytes) -> bool:
        return page in INDEX

    def stored(self, pages: Sequence[bytes], before: Sequence[bytes]) -> None:
        INDEX.update(pages)

    def not_stored(self, pages: Sequence[bytes]) -> None:
        """They are not in the index."""

    def lost(self, pages: Sequence[bytes]) -> None:
        INDEX.difference_update(pages)


class ShelfEngine(EngineHook):
    name = "shelf"
    opt_in = True
    tier = ShelfTier()
    pages: Pages

    def attach(self, pages: Pages) -> None:
        self.pages = pages

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        """Count the worker half's pages that are larger than some bytes."""
        if method != "count":
            return super().call(method, args)
        return mapped(self.pages.call("count", args), lambda counts: {"of each rank": counts})


def build_engine(context: FeatureContext) -> ShelfEngine:
    return ShelfEngine()
