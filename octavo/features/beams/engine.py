"""`BeamsEngine`: the engine half. It runs a search over the sequences of a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.output import FinishReason, TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features import FeatureContext
from octavo.features.beams.payload import NAME
from octavo.features.beams.search import BeamSearch
from octavo.schedule.hooks import Ending, EngineHook, Lockstep


class Beams(msgspec.Struct, frozen=True, array_like=True):
    """The request's option."""

    width: int
    length_penalty: float = 1.0


class Search(Lockstep):
    """One search, as the lockstep of a request's sequences."""

    param = "beam_width"

    def __init__(self, beams: Beams) -> None:
        self.width = beams.width
        self._penalty = beams.length_penalty

    def begin(self, max_tokens: int, stop_ids: frozenset[int]) -> None:
        self._search = BeamSearch(self.width, self._penalty, stop_ids, max_tokens)
        self.params = SamplingParams(temperature=0, logprobs=self._search.keep, max_tokens=max_tokens)

    def step(self, outputs: Sequence[list[int]], found: Sequence[TokenLogprobs]) -> list[tuple[int, int]] | None:
        return self._search.step(outputs, found)

    def endings(self) -> list[Ending]:
        return [
            Ending(
                one.tokens,
                FinishReason.STOP if one.stopped else FinishReason.LENGTH,
                {NAME: msgspec.msgpack.encode(one.logprob)},
            )
            for one in self._search.finished
        ]


class BeamsEngine(EngineHook):
    """Stateless: a search is kept with the siblings of its request."""

    name = NAME
    opt_in = True
    admits_for_good = True

    def lockstep(self, spec: GenerateRequest) -> Lockstep | None:
        return Search(msgspec.msgpack.decode(spec.options[NAME], type=Beams))


def build_engine(context: FeatureContext) -> BeamsEngine | None:
    """Return None for an engine that generates no text. No cost until the first search."""
    return BeamsEngine() if context.generates else None
