"""`ScoreItem`: one score in an answer, of a pair of texts or of a label."""

from __future__ import annotations

import msgspec


class ScoreItem(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    object: str = "score"
    index: int
    score: float
