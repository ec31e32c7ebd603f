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
        first: dict[int, int] = {}
        for row, slot in enumerate(slots):
            first.setdefault(slot, row)
        rows, before, row = [], -1, 0
        for slot in payload.slots:
            row = row + 1 if slot == before else first[slot]
            rows.append(row)
            before = slot
        words = np.frombuffer(payload.bits, dtype=np.int32).reshape(len(payload.slots), -1)
        return Allowed(rows, words, {rows[mask]: error for mask, error in payload.errors.items()})


def build_worker(context: FeatureContext) -> GrammarWorker:
    return GrammarWorker(NAME)
