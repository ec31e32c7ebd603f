"""`Slots`: the truth about running requests, one fixed row each, in the host's memory (numpy: see `inputs.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.params import LogprobsMode
from octavo.core.plan import NewRow, StepPlan
from octavo.native.sampling import SAMPLING
from octavo.sampling.state import PreparedParams, SampleRow

Ints = NDArray[np.int64]


@dataclass(slots=True)
class _Sampling:
    params: PreparedParams
    num_prompt: int


class Slots:
    """Row s holds the request in slot s.

    tokens [slots, max_model_len] int32: all known tokens; length [slots]: how many; computed [slots]: positions whose
    KV is written; block_tables [slots, blocks] int32; sampling [slots], for the kernels. Memory is touched
    only as rows fill.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_blocks: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        self.tokens = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.sampling = np.zeros(num_slots, dtype=SAMPLING)
        self._vocab_size = vocab_size
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._sampling: list[_Sampling | None] = [None] * num_slots
        self._reporting: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes: requests that took a slot, then changed block tables."""
        for row in plan.new:
            self._fill(row)
        for slot, _, index, block in plan.block_writes:
            self.block_tables[slot, index] = block

    def plain(self, slots: list[int]) -> bool:
        """Whether all these slots' requests want the most likely token and nothing else."""
        return all(params is not None and params.plain for params in self.params(slots))

    def params(self, slots: list[int]) -> list[PreparedParams | None]:
        """How these slots' requests are sampled; None for an empty slot."""
        return [None if (one := self._sampling[slot]) is None else one.params for slot in slots]

    def sample_rows(self, slots: list[int]) -> list[SampleRow]:
        """What the sampler needs to know of these slots' requests."""
        rows = []
        for slot, length in zip(slots, self.length[slots].tolist(), strict=True):
            sampling = self._sampling[slot]
            if sampling is None:
                raise AssertionError(f"slot {slot} is sampled but empty")
            rows.append(SampleRow(sampling.params, self.tokens[slot, :length], sampling.num_prompt))
        return rows

    def reports(self, slots: list[int]) -> bool:
        """Whether the prompt of one of these is to be reported on."""
        return not self._reporting.isdisjoint(slots)

    def prompt_rows(self, plan: StepPlan) -> list[tuple[int, int, int, int]]:
        """Rows whose prompt is to be reported on: (row, slot, alternatives, prompt tokens that follow its tokens).

        To be asked before `advance`.
        """
        if not self.reports(plan.slots):
            return []
        found = []
        for row, slot in enumerate(plan.slots):
            sampling = self._sampling[slot]
            if sampling is None or sampling.params.prompt_logprobs is None:
                continue
            start = int(self.computed[slot])
            following = min(plan.num_tokens[row], sampling.num_prompt - 1 - start)
            if following > 0:
                found.append((row, slot, sampling.params.prompt_logprobs, following))
        return found

    def advance(self, slots: Ints, num_tokens: Ints) -> None:
        """These slots [R] have had `num_tokens` [R] more positions computed."""
        self.computed[slots] += num_tokens

    def append(self, slots: list[int], tokens: Ints) -> None:
        """One sampled token [S] for each of these slots [S]."""
        lengths = self.length[slots]
        self.tokens[slots, np.minimum(lengths, self.tokens.shape[1] - 1)] = tokens
        self.length[slots] = lengths + 1

    def retract(self, slots: list[int]) -> None:
        """Forget the last token of each of these slots."""
        self.length[slots] -= 1

    def _fill(self, row: NewRow) -> None:
        slot = row.slot
        self.tokens[slot, : len(row.tokens)] = row.tokens
        self.length[slot] = len(row.tokens)
        self.computed[slot] = row.num_computed
        self.block_tables[slot, : len(row.blocks[0])] = row.blocks[0]
        params = PreparedParams.of(row, self._vocab_size, self._logprobs_mode)
        self._sampling[slot] = _Sampling(params, row.num_prompt)
        self.sampling[slot] = params.packed(row.num_prompt)
        self._reporting.discard(slot)
        if params.prompt_logprobs is not None:
            self._reporting.add(slot)
