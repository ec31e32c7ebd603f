"""`ProcessorsWorker`: the worker half. It applies processors to their rows and contains their errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.features import FeatureContext
from octavo.features.logits_processors.interface import Row
from octavo.features.logits_processors.load import LoadedProcessor, load
from octavo.features.logits_processors.payload import NAME, RowUpdate, Shares
from octavo.worker.hooks import WorkerHook

log = logging.getLogger(__name__)


class ProcessorsWorker(WorkerHook):
    """Keeps, by slot, one `Row` for each processor that accepted the slot's request."""

    def __init__(self, name: str, loaded: Sequence[LoadedProcessor]) -> None:
        self.name = name
        self._loaded = loaded
        self._rows: dict[int, dict[int, Row]] = {}

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        self._rows.pop(slot, None)

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Shares) -> Mapping[int, str]:
        place_of = {slot: place for place, slot in enumerate(slots)}
        places: dict[int, list[int]] = {}
        for share in payload.rows:
            self._take(share)
            for number in share.processors:
                places.setdefault(number, []).append(place_of[share.slot])
        failed: dict[int, str] = {}
        for number, loaded in enumerate(self._loaded):
            chosen = [place for place in places.get(number, ()) if place not in failed]
            if chosen:
                rows = [self._rows[slots[place]][number] for place in chosen]
                failed |= run(loaded, logits, chosen, rows)
        return failed

    def _take(self, share: RowUpdate) -> None:
        if share.params is not None and share.prompt is not None:
            prompt, output = list(share.prompt), list(share.output)
            self._rows[share.slot] = {number: Row(share.params, prompt, output) for number in share.processors}
            return
        first = self._rows[share.slot][share.processors[0]]
        first.output_ids[share.start :] = share.output


def run(loaded: LoadedProcessor, logits: Tensor, places: Sequence[int], rows: Sequence[Row]) -> dict[int, str]:
    """Apply one processor to these rows of logits [S, vocab]; return index -> error text of the rows that failed.

    If it fails on several rows at once, each is tried alone, so that only the faulty requests end.
    """
    if not loaded.processor.alone and len(rows) > 1:
        try:
            _apply(loaded, logits, places, rows)
        except Exception:  # a user's processor may raise anything
            log.warning("the logits processor %s failed on a batch; it is tried row by row", loaded.name)
        else:
            return {}
    failed = {}
    for place, row in zip(places, rows, strict=True):
        try:
            _apply(loaded, logits, [place], [row])
        except Exception as exc:  # as above
            log.exception("the logits processor %s failed on a request, which ends here", loaded.name)
            failed[place] = f"The logits processor {loaded.name} failed: {type(exc).__name__}: {exc}"
    return failed


def _apply(loaded: LoadedProcessor, logits: Tensor, places: Sequence[int], rows: Sequence[Row]) -> None:
    """Change the rows of logits only if the call succeeds."""
    index = upload(np.asarray(places), logits.device)
    part = logits.index_select(0, index).to(torch.float32)
    changed = loaded.processor.apply(part, rows)
    if changed is None:
        changed = part
    if not isinstance(changed, Tensor) or changed.shape != part.shape:
        shape = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
        raise TypeError(f"it must return logits of shape {list(part.shape)}, not {shape}")
    logits.index_copy_(0, index, changed.to(logits.dtype))


def build_worker(context: FeatureContext) -> ProcessorsWorker | None:
    """Return None without processors."""
    loaded = load(context)
    return ProcessorsWorker(NAME, loaded) if loaded else None
