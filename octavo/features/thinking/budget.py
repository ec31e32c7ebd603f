"""`ThinkingBudget`: how long a model may reason before it must answer."""

from __future__ import annotations

import msgspec


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        tokens: of reasoning, the marks not counted; then the end mark is written for the model.
        begin, end: the marks around reasoning.
        open: the prompt ends within reasoning; else the output's first words show whether there is any.
    """

    tokens: int
    begin: str
    end: str
    open: bool
