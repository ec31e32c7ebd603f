from __future__ import annotations

from collections.abc import Sequence

from octavo.features import FeatureContext
from octavo.schedule.hooks import EngineHook

INDEX: set[bytes] = set()


class ShelfTier:
    name = "shelf"
    deadline_s = 60.0

    def holds(self, page: bytes) -> bool:
        return page in INDEX

    def stored(self, pages: Sequence[bytes]) -> None:
        INDEX.update(pages)

    def lost(self, pages: Sequence[bytes]) -> None:
        INDEX.difference_update(pages)


class ShelfEngine(EngineHook):
    name = "shelf"
    opt_in = True
    tier = ShelfTier()


def build_engine(context: FeatureContext) -> ShelfEngine:
    return ShelfEngine()
