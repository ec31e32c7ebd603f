"""`GrammarWorker`: the worker half. It hands the masks to the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.features import FeatureContext
from octavo.features.grammar.payload import NAME, Masks
from octavo.sampling.allowed import Allowed
from octavo.worker.hooks import WorkerHook


class GrammarWorker(WorkerHook):
    """Stateless: everything is in the payload."""

    def __init__(self, name: str) -> None:
        self.name = name

    def allowed(self, slots: Sequence[int], payload: Masks) -> Allowed:
        row_of = {slot: row for row, slot in enumerate(slots)}
        words = np.frombuffer(payload.bits, dtype=np.int32).reshape(len(payload.slots), -1)
        errors = {row_of[slot]: error for slot, error in payload.errors.items()}
        return Allowed([row_of[slot] for slot in payload.slots], words, errors)


def build_worker(context: FeatureContext) -> GrammarWorker:
    return GrammarWorker(NAME)
