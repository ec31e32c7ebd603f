"""`PoolingEngine`: the engine half. It says where in a step's batch the prompts lie that are pooled."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.plan import PlanDraft
from octavo.core.request import Request
from octavo.schedule.hooks import EngineHook


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt in a step's batch.

    Attributes:
        row, slot: the batch's row, and the slot of its request.
        start, count: its tokens are [start, start + count) of the batch.
        first: the part's position in the prompt.
        ends: the prompt ends with it.
    """

    row: int
    slot: int
    start: int
    count: int
    first: int
    ends: bool


class PoolingEngine(EngineHook):
    """Steps without such requests cost it nothing."""

    opt_in = True
    admits_for_good = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._alive: set[Request] = set()

    def admit(self, request: Request, num_tokens: int) -> int:
        if self.name in request.spec.options:
            self._alive.add(request)
        return num_tokens

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if not self._alive:
            return
        spans, start = [], 0
        for row, (request, count) in enumerate(zip(rows, draft.num_tokens, strict=True)):
            if request in self._alive:
                end = request.num_computed  # once this step has run
                spans.append(Span(row, draft.slots[row], start, count, end - count, end == request.num_prompt))
            start += count
        if spans:
            draft.payload[self.name] = spans

    def on_release(self, request: Request) -> None:
        self._alive.discard(request)
