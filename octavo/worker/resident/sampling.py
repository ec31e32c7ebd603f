"""`SamplingGraphs`: recorded sampling of decoding steps: output head, draw, and appending of the tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.device.transfer import Graph, GraphRecorder, download
from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.sampling.allowed import Allowed
from octavo.sampling.resident import PendingTokens, ResidentSampler
from octavo.worker.hooks import Variant
from octavo.worker.resident.slots import DeviceSlots


class SamplingGraphs:
    """One graph per batch size and variant. Each samples plainly, for the first rows of fixed buffers."""

    def __init__(self, model: Model, slots: DeviceSlots, sampler: ResidentSampler) -> None:
        self._model = model
        self._slots = slots
        self._sampler = sampler
        self._graphs: dict[tuple[int, Variant], Graph] = {}

    def bind(self, rows: Tensor, hidden: Tensor) -> None:
        """Set the inputs. Call before `record`.

        Args:
            rows: [largest size] int32, the slots.
            hidden: [largest size, hidden_size].
        """
        self._rows, self._hidden = rows, hidden
        self._sampled = torch.empty_like(rows)

    def compute(self, size: int) -> None:
        """Sample without a recording."""
        rows, hidden, model = self._rows[:size], self._hidden[:size], self._model
        parts = model.logits_in_parts(hidden) if isinstance(model, CausalLM) else None
        if parts is None:
            self._sampled[:size].copy_(self._sampler.draw(model.logits(hidden), rows))
        else:
            self._sampled[:size].copy_(self._sampler.draw_divided(parts, rows))
        self._slots.append(rows, self._sampled[:size])

    def record(self, recorder: GraphRecorder, size: int, variant: Variant) -> None:
        self._graphs[size, variant] = recorder.record(partial(self.compute, size))

    def replay(self, size: int, variant: Variant, count: int, allowed: Allowed | None) -> PendingTokens:
        """Sample a recorded size; return the tokens of its first `count` rows."""
        with self._sampler.allowing(allowed):
            self._graphs[size, variant].replay()
        return PendingTokens(download(self._sampled[:count]), [])

    def close(self) -> None:
        self._graphs.clear()
