"""`GrammarWorker`: the worker half. It sets the logits of forbidden tokens to minus infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.features.grammar.engine import Masks
from octavo.worker.hooks import WorkerHook

_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


class GrammarWorker(WorkerHook):
    """Keeps nothing: all is in the payload."""

    def __init__(self, name: str) -> None:
        self.name = name

    def apply(self, logits: Tensor, slots: Sequence[int], payload: Masks) -> Mapping[int, str]:
        row_of = {slot: row for row, slot in enumerate(slots)}
        forbidden = unpack_forbidden(payload.bits, len(payload.slots), logits.shape[1], logits.device)
        if len(payload.slots) == len(slots):  # then they are in the same order
            logits.masked_fill_(forbidden, float("-inf"))
        else:
            rows = upload(np.asarray([row_of[slot] for slot in payload.slots]), logits.device)
            logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))
        return {row_of[slot]: error for slot, error in payload.errors.items()}


def unpack_forbidden(bits: bytearray, rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """bool [rows, vocab_size], true where the bit is not set."""
    packed = torch.frombuffer(bits, dtype=torch.uint8).view(rows, -1, 1).to(device, non_blocking=True)
    return ((packed & _BITS.to(device, non_blocking=True)) == 0).view(rows, -1)[:, :vocab_size]
