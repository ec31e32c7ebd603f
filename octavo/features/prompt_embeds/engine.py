"""`EmbedsEngine`: the engine half. It cuts out of requests' embeddings what a step computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from octavo.core.errors import ConfigError
from octavo.core.plan import PlanDraft
from octavo.features import FeatureContext
from octavo.features.prompt_embeds.payload import NAME, Piece, Pieces
from octavo.features.prompt_embeds.settings import Settings
from octavo.features.prompt_embeds.span import EmbedSpan
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request


class EmbedsEngine(EngineHook):
    """Whatever computes a placeholder, for the first time or again, finds its embedding in the step's payload."""

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
        pieces: list[Piece] = []
        start = 0
        for request, count in zip(rows, draft.num_tokens, strict=True):
            first = request.num_computed - count  # which counts this step's already
            if first < request.num_prompt and request in self._spans:
                for span in self._spans[request]:
                    pieces += _piece(span, first, first + count, start - first)
            start += count
        if pieces:
            draft.payload[self.name] = Pieces(pieces)

    def on_release(self, request: Request) -> None:
        self._spans.pop(request, None)


def _piece(span: EmbedSpan, first: int, end: int, shift: int) -> Iterator[Piece]:
    """What of a span is at positions [first, end), if anything is; they are `shift` further on in the batch."""
    begin, stop = max(first, span.start), min(end, span.start + span.count)
    if begin < stop:
        size = len(span.data) // span.count
        yield Piece(begin + shift, span.dtype, span.data[(begin - span.start) * size : (stop - span.start) * size])


def build_engine(context: FeatureContext) -> EmbedsEngine | None:
    """None unless the settings enable it. Idle until the first such request.

    Raises:
        ConfigError: it is enabled for a model that makes no text.
    """
    if not context.settings_of(Settings).enable_prompt_embeds:
        return None
    if not context.generates:
        name = context.model_name
        raise ConfigError(f"--enable-prompt-embeds: {name} takes texts to compute embeddings. Leave it out.")
    return EmbedsEngine(NAME)
