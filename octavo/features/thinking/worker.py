"""`ThinkingWorker`: the worker half. It masks all but the forced token of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from octavo.features import FeatureContext
from octavo.features.thinking.payload import NAME, Forced
from octavo.worker.hooks import WorkerHook


class ThinkingWorker(WorkerHook):
    """Stateless: everything is in the payload."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Forced) -> Mapping[int, str]:
        for row, slot in enumerate(slots):
            if (token := payload.tokens.get(slot)) is not None:
                logits[row] = float("-inf")
                logits[row, token] = 0.0
        return {}


def build_worker(context: FeatureContext) -> ThinkingWorker:
    return ThinkingWorker(NAME)
