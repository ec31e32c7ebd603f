"""`Choosing`: the tokens of rows of logits, by the native kernels where they can, else by torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.native.program import Pool
from octavo.native.sampling import sample
from octavo.sampling.allowed import Allowed, forbid
from octavo.sampling.sampler import Sampler, bad_rows, logprobs_of
from octavo.sampling.state import SampleResult
from octavo.worker.slots import Slots


class Choosing:
    """A row's token depends on its request and its mask alone.

    Args:
        pool: the kernels' threads; None if there are no kernels.
    """

    def __init__(self, slots: Slots, sampler: Sampler, pool: Pool | None = None) -> None:
        self._slots = slots
        self._sampler = sampler
        self._pool = pool

    def choose(self, logits: Tensor, slots: list[int], allowed: Allowed | None = None) -> SampleResult:
        """A token for each of the slots, from logits [S, vocab] of any floating dtype.

        What is not `allowed` may be taken out of `logits`.
        """
        if self._pool is not None:
            return self._natively(self._pool, logits, slots, allowed)
        if allowed is not None:
            forbid(logits, allowed)
        if self._slots.plain(slots):
            return self._sampler.greedy(logits)
        return self._sampler.sample(logits, self._slots.sample_rows(slots))

    def _natively(self, pool: Pool, logits: Tensor, slots: list[int], allowed: Allowed | None) -> SampleResult:
        table = self._slots
        asking = {i: one.logprobs for i, one in enumerate(table.params(slots)) if one is not None}
        if allowed is not None:
            forbid(logits, allowed.of([i for i, count in asking.items() if count is not None]))
        values = logits.float()
        values = values if values.stride(1) == 1 else values.contiguous()
        tokens, peaks = sample(
            pool,
            values.data_ptr(),
            values.stride(0),
            values.shape[1],
            np.array(slots),
            table.sampling,
            table.tokens,
            table.length,
            None if allowed is None else allowed.addresses(len(slots)),
        )
        bad, chosen = bad_rows(peaks), torch.from_numpy(tokens)
        asking = {i: report for i, report in asking.items() if i not in bad}
        told = logprobs_of(logits, asking, chosen, lambda some: table.sample_rows([slots[i] for i in some]))
        return SampleResult(chosen, told, bad)
