"""`ThinkingBudget`: the limit on a request's reasoning."""

from __future__ import annotations

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        tokens: most tokens of reasoning, marks not counted; then the end mark is forced.
        begin, end: token ids of the marks around reasoning.
        open: whether the prompt ends within reasoning; otherwise the output's first tokens decide.
    """

    tokens: int
    begin: str
    end: str
    open: bool
