"""`PoolingEngine`: the engine half. It locates the pooled prompts in a step's batch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.plan import PlanDraft
from octavo.features import FeatureContext
from octavo.features.pooling.checkpoint import pooler_of
from octavo.features.pooling.payload import NAME, PromptSpan, PromptSpans
from octavo.features.pooling.settings import PoolingSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request


class PoolingEngine(EngineHook):
    """Steps without such requests cost nothing."""

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
                spans.append(PromptSpan(row, draft.slots[row], start, count, end - count, end == request.num_prompt))
            start += count
        if spans:
            draft.payload[self.name] = PromptSpans(spans)

    def on_release(self, request: Request) -> None:
        self._alive.discard(request)


def build_engine(context: FeatureContext) -> PoolingEngine:
    """Return the engine half. No cost until the first such request.

    Raises:
        ConfigError: the checkpoint or the settings require unsupported pooling.
    """
    hook = PoolingEngine(NAME)
    hook.tasks = ("embed", "token_embed", *(["classify"] if context.num_labels else []))
    if context.files is not None:
        config = context.settings_of(PoolingSettings).pooler_config
        info = pooler_of(
            context.files, config, size=context.hidden_size, default=context.summary, labels=context.num_labels
        )
        hook.info = msgspec.Raw(msgspec.msgpack.encode(info))
    return hook
