from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.features import FeatureContext
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request


class TallyEngine(EngineHook):
    name = "tally"
    opt_in = True
    admits_for_good = True

    def __init__(self) -> None:
        self.counts: dict[Request, int] = {}

    def on_commit(self, request: Request, tokens: Sequence[int]) -> bool:
        self.counts[request] = self.counts.get(request, 0) + sum(token % 2 == 0 for token in tokens)
        return False

    def result(self, request: Request) -> bytes:
        word = msgspec.msgpack.decode(request.spec.options[self.name], type=str)
        return f" {word}: {self.counts.get(request, 0)}".encode()

    def on_release(self, request: Request) -> None:
        self.counts.pop(request, None)


def build_engine(context: FeatureContext) -> TallyEngine:
    return TallyEngine()
