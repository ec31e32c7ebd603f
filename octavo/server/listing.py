"""`Listing`: an answer with an item for each input, and the items that several routes share."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

Item = TypeVar("Item")
Counts = TypeVar("Counts")


class Listing(msgspec.Struct, Generic[Item, Counts], frozen=True, kw_only=True):
    """An answer with an item for each input, in their order. A field that is UNSET is left out of the JSON."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Item]
    usage: Counts
    warnings: list[str] | UnsetType = UNSET


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """One score: of a pair of texts, or of a label."""

    object: str = "score"
    index: int
    score: float
