"""`DeviceSampler`: the `Sampler` for slots on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.spans import Spans, Watched
from octavo.device.transfer import download, upload
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn
from octavo.sampling.resident import PendingTokens, ResidentSampler, Verified
from octavo.sampling.resident_drafts import DraftRow, DraftSampler
from octavo.sampling.resident_logprobs import Columns, entries_of, prompt_columns
from octavo.worker.drafts import DraftRows
from octavo.worker.resident.slots import DeviceSlots
from octavo.worker.step import PromptRow, Step


class DeviceSampler:
    """Launches the kernels that sample and append tokens, without waiting for them."""

    def __init__(self, slots: DeviceSlots, sampler: ResidentSampler, drafted: DraftSampler | None = None) -> None:
        """`drafted`: samples where drafts are involved; None if no feature drafts."""
        self._slots = slots
        self._sampler = sampler
        self._drafted = drafted

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        if self._drafted is not None and (rows := self._slots.draft_rows(step.plan)) is not None:
            return self._sample_drafted(self._drafted, logits, step, allowed, rows)
        with self._sampler.allowing(allowed):
            tokens, logprobs = self._sampler.sample(logits, step.rows, self._slots.sample_rows(step.plan))
        self._slots.append(step.rows, tokens)
        return PendingTokens(download(tokens), logprobs)

    def _sample_drafted(
        self, sampler: DraftSampler, logits: Tensor, step: Step, allowed: Allowed | None, rows: Sequence[DraftRow]
    ) -> Drawn:
        """Sample rows that have drafts to verify, or whose lengths the host does not know."""
        plan = step.plan
        ahead = upload(DraftRows.of(plan, self._slots.tree).ahead.astype(np.int32), logits.device)
        with sampler.allowing(allowed):
            tokens, logprobs = sampler.sample_drafted(logits, step.rows, ahead, rows)
        if not any(plan.num_drafts) or self._slots.drafts is None:
            self._slots.append(step.rows, tokens)
            return PendingTokens(download(tokens), logprobs)
        found = self._slots.drafts.accept(plan, tokens)
        return Verified(download(found.tokens), logprobs, download(found.kept), found.settle, order=found.order)

    def num_candidates(self, step: Step) -> int:
        """Return 0: to find out whether some tokens suffice, the host would have to wait for the device."""
        return 0

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        assert row.hidden is not None
        return partial(_entries, prompt_columns(row.hidden, row.following, row.count, logits_of))

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self._sampler, "sample", "choose"))


def _entries(columns: list[Columns]) -> list[TokenLogprobs]:
    return [entry for part in columns for entry in entries_of(part)]
