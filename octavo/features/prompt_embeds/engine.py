"""`EmbedsEngine`: the engine half. It selects the embeddings that a step computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.plan import PlanDraft
from octavo.features import FeatureContext
from octavo.features.prompt_embeds.payload import NAME, EmbedPiece, Pieces
from octavo.features.prompt_embeds.settings import PromptEmbedsSettings
from octavo.features.prompt_embeds.span import EmbedSpan
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request


class EmbedsEngine(EngineHook):
    """Each step that computes a placeholder, initially or again, carries its embedding in the payload."""

    opt_in = True
    admits_for_good = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._spans: dict[Request, list[EmbedSpan]] = {}
        self._decode = msgspec.msgpack.Decoder(list[EmbedSpan]).decode

    def admit(self, request: Request, num_tokens: int) -> int:
        option = request.spec.options.get(self.name)
        if option is not None and request not in self._spans:
            self._spans[request] = self._decode(option)
        return num_tokens

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if not self._spans:
            return
        pieces: list[EmbedPiece] = []
        start = 0
        for request, count in zip(rows, draft.num_tokens, strict=True):
            first = request.num_computed - count  # num_computed includes this step
            if first < request.num_prompt and request in self._spans:
                for span in self._spans[request]:
                    pieces += _piece(span, first, first + count, start - first)
            start += count
        if pieces:
            draft.payload[self.name] = Pieces(pieces)

    def on_release(self, request: Request) -> None:
        self._spans.pop(request, None)


def _piece(span: EmbedSpan, first: int, end: int, shift: int) -> Iterator[EmbedPiece]:
    """Return the part of a span at positions [first, end), or None; batch index = position + `shift`."""
    begin, stop = max(first, span.start), min(end, span.start + span.count)
    if begin < stop:
        size = len(span.data) // span.count
        yield EmbedPiece(begin + shift, span.dtype, span.data[(begin - span.start) * size : (stop - span.start) * size])


def build_engine(context: FeatureContext) -> EmbedsEngine | None:
    """Return None unless the settings enable it. No cost until the first such request.

    Raises:
        ConfigError: enabled for a model that generates no text.
    """
    if not context.settings_of(PromptEmbedsSettings).enable_prompt_embeds:
        return None
    if not context.generates:
        name = context.model_name
        raise ConfigError(f"--enable-prompt-embeds: {name} takes texts to compute embeddings. Leave it out.")
    return EmbedsEngine(NAME)
