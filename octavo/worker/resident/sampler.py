"""`DeviceSampler`: the `Sampler` for slots on the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.spans import Spans, Watched
from octavo.device.transfer import download
from octavo.sampling.allowed import Allowed
from octavo.sampling.drawn import Drawn
from octavo.sampling.resident import ResidentSampler, Sampled
from octavo.sampling.resident_logprobs import Columns, entries_of, prompt_columns
from octavo.worker.resident.slots import DeviceSlots
from octavo.worker.step import PromptRow, Step


class DeviceSampler:
    """Launches the kernels that sample and append tokens, without waiting for them."""

    def __init__(self, slots: DeviceSlots, sampler: ResidentSampler) -> None:
        self._slots = slots
        self._sampler = sampler

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        with self._sampler.allowing(allowed):
            tokens, logprobs = self._sampler.sample(logits, step.rows, self._slots.sample_rows(step.plan))
        self._slots.append(step.rows, tokens)
        return Sampled(download(tokens), logprobs)

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        assert row.hidden is not None
        return partial(_entries, prompt_columns(row.hidden, row.following, row.count, logits_of))

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self._sampler, "sample", "choose"))


def _entries(columns: list[Columns]) -> list[TokenLogprobs]:
    return [entry for part in columns for entry in entries_of(part)]
