"""`PoolingEngine`: the engine half. It says where in a step's batch the prompts lie that are pooled."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.plan import PlanDraft
from octavo.core.request import Request
from octavo.features import FeatureContext
from octavo.features.pooling.payload import NAME, Span, Spans
from octavo.schedule.hooks import EngineHook


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
            draft.payload[self.name] = Spans(spans)

    def on_release(self, request: Request) -> None:
        self._alive.discard(request)


def build_engine(context: FeatureContext) -> PoolingEngine:
    """Costs nothing until the first such request."""
    return PoolingEngine(NAME)
