"""`LastPairs`: which of a step's tokens is the last one before the token just drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.device.base import Device


class LastPairs:
    """Follows the lengths of slots on the device, which alone knows how many drafts of a step were accepted."""

    def __init__(self, num_slots: int, device: Device) -> None:
        self._device = device
        self._known = torch.zeros(num_slots, dtype=torch.int64, device=device.torch_device)

    def of(self, plan: StepPlan, slots: Tensor, known: Tensor) -> Tensor:
        """Return for each of the plan's R rows the index in the batch of the last token that was kept, [R] int64.

        Args:
            slots: [R] int64, the rows' slots.
            known: [R] int64, their known tokens, those just drawn included.
        """
        ends, drafts = np.cumsum(plan.num_tokens), np.array(plan.num_drafts)
        first = self._device.upload(ends - 1 - drafts)
        kept = known - self._known[slots]
        self._known[slots] = known
        if not drafts.any():
            return first
        return torch.where(self._device.upload(drafts) > 0, first + kept - 1, first)
