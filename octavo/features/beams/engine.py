"""`BeamsEngine`: the engine half. It makes a search of the sequences of one request."""

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
    """What a request asks for, as its option."""

    width: int
    length_penalty: float = 1.0


class Search(Lockstep):
    """One search: the lockstep of its beams."""

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
    """Keeps nothing: a search is in the siblings of its request."""

    name = NAME
    opt_in = True
    admits_for_good = True

    def lockstep(self, spec: GenerateRequest) -> Lockstep | None:
        return Search(msgspec.msgpack.decode(spec.options[NAME], type=Beams))


def build_engine(context: FeatureContext) -> BeamsEngine | None:
    """None for an engine that makes no text. Idle until the first search."""
    return BeamsEngine() if context.generates else None
