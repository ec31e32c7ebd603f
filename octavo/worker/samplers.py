"""`TorchSampler` and `NativeSampler`: the `RowSampler`s for logits in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from octavo.core.output import TokenLogprobs
from octavo.core.spans import Spans, Watched
from octavo.native.program import Pool
from octavo.native.sampling import sample
from octavo.sampling.allowed import Allowed, forbid
from octavo.sampling.drawn import Drawn, DrawnHere
from octavo.sampling.prompt_logprobs import prompt_logprobs
from octavo.sampling.sampler import RowSampler, bad_rows, logprobs_of
from octavo.sampling.state import SampleResult, SampleRow
from octavo.worker.drafts import DraftRows
from octavo.worker.slots import HostSlots, Ints
from octavo.worker.step import PromptRow, Step


class TorchSampler:
    """Samples with torch. A row's token depends only on its request and its mask, not on other rows."""

    def __init__(self, slots: HostSlots) -> None:
        self._slots = slots
        self._sampler = RowSampler()

    def choose(
        self, logits: Tensor, slots: Sequence[int], allowed: Allowed | None = None, ahead: Ints | None = None
    ) -> SampleResult:
        """Choose a token for each of the S slots.

        Args:
            logits: [S, vocab], of any floating dtype; may be overwritten.
            ahead: [S], number of the slot's drafts before each row; None for none.
        """
        if allowed is not None:
            forbid(logits, allowed)
        if self._slots.plain(slots):
            return self._sampler.greedy(logits)
        return self._sampler.sample(logits, self._slots.sample_rows(slots, ahead))

    def sample(self, logits: Tensor, step: Step, allowed: Allowed | None) -> Drawn:
        plan = step.plan
        drafted = any(plan.num_drafts)
        ahead = DraftRows.of(plan, self._slots.tree).ahead if drafted else None
        result = self.choose(logits, step.rows, allowed, ahead)
        if not drafted:
            self._slots.append(step.rows, result.tokens.numpy())
        tokens = result.tokens.numpy().astype(np.int64)
        tokens[list(result.bad_rows)] = -1
        kept, order = self._slots.accept(plan, tokens) if drafted else (None, None)
        return DrawnHere(tokens.tolist(), result.logprobs, kept, order)

    def num_candidates(self, step: Step) -> int:
        counts = [0 if one is None else one.num_candidates for one in self._slots.params(step.rows)]
        return max(counts) if all(counts) else 0

    def prompt(self, row: PromptRow, logits_of: Callable[[Tensor], Tensor]) -> Callable[[], list[TokenLogprobs]]:
        assert row.hidden is not None
        found = prompt_logprobs(row.hidden, row.following, row.count, logits_of)
        return lambda: found

    def watch(self, spans: Spans) -> None:
        spans.watch(Watched(self, "choose", "choose"))


class NativeSampler(TorchSampler):
    """Samples with native kernels; computes log-probabilities with torch."""

    def __init__(self, slots: HostSlots, pool: Pool) -> None:
        """
        Args:
            pool: the kernels' threads.
        """
        super().__init__(slots)
        self._pool = pool

    def choose(
        self, logits: Tensor, slots: Sequence[int], allowed: Allowed | None = None, ahead: Ints | None = None
    ) -> SampleResult:
        table = self._slots
        asking = {i: one.logprobs for i, one in enumerate(table.params(slots)) if one is not None}
        if allowed is not None:
            forbid(logits, allowed.of([i for i, count in asking.items() if count is not None]))
        values = logits.float()
        values = values if values.stride(1) == 1 else values.contiguous()
        tokens, peaks = sample(
            self._pool,
            values.data_ptr(),
            values.stride(0),
            values.shape[1],
            np.array(slots),
            table.sampling,
            table.tokens,
            table.length,
            None if allowed is None else allowed.addresses(len(slots)),
            ahead,
        )
        bad, chosen = bad_rows(peaks), torch.from_numpy(tokens)
        asking = {i: report for i, report in asking.items() if i not in bad}
        told = logprobs_of(logits, asking, chosen, partial(self._rows_of, slots, ahead))
        return SampleResult(chosen, told, bad)

    def _rows_of(self, slots: Sequence[int], ahead: Ints | None, some: list[int]) -> list[SampleRow]:
        return self._slots.sample_rows([slots[i] for i in some], None if ahead is None else ahead[some])
