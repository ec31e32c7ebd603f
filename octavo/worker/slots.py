"""`Slots`: the truth about running requests, one fixed row each, on the device. The CPU side only knows bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.plan import NewRow, StepPlan
from octavo.sampling.state import PreparedParams, SampleRow


@dataclass(slots=True)
class _Sampling:
    params: PreparedParams
    num_prompt: int


class Slots:
    """Row s holds the request in slot s.

    tokens [slots, max_model_len] int32: all known tokens; length [slots]: how many; computed [slots]: positions whose
    KV is written; block_tables [slots, blocks] int32. Memory is touched only as rows fill.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, max_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        self.tokens = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)
        self.length = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.computed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        self._sampling: list[_Sampling | None] = [None] * num_slots

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes: requests that took a slot, then changed block tables."""
        for row in plan.new:
            self._fill(row)
        if plan.block_writes:
            slots, indices, blocks = torch.tensor(plan.block_writes).unbind(1)
            self.block_tables[slots, indices] = blocks.to(self.block_tables.dtype)

    def sample_rows(self, slots: list[int]) -> list[SampleRow]:
        """What the sampler needs to know of these slots' requests."""
        lengths = self.length[slots].tolist()
        rows = []
        for slot, length in zip(slots, lengths, strict=True):
            sampling = self._sampling[slot]
            if sampling is None:
                raise AssertionError(f"slot {slot} is sampled but empty")
            rows.append(SampleRow(sampling.params, self.tokens[slot, :length], sampling.num_prompt))
        return rows

    def prompt_rows(self, plan: StepPlan) -> list[tuple[int, int, int, int]]:
        """Rows whose prompt is to be reported on: (row, slot, alternatives, prompt tokens that follow its tokens).

        To be asked before `advance`.
        """
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

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """These slots [R] have had `num_tokens` [R] more positions computed."""
        self.computed.numpy()[slots.numpy()] += num_tokens.numpy()

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """One sampled token [S] for each of these slots [S]."""
        lengths = self.length[slots]
        self.tokens[slots, lengths.clamp(max=self.tokens.shape[1] - 1)] = tokens.to(self.tokens.dtype)
        self.length[slots] = lengths + 1

    def _fill(self, row: NewRow) -> None:
        slot = row.slot
        self.tokens[slot, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        self.length[slot] = len(row.tokens)
        self.computed[slot] = row.num_computed
        self.block_tables[slot, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
        params = PreparedParams.make(row.params, row.seed, row.stop_ids, self._vocab_size)
        self._sampling[slot] = _Sampling(params, row.num_prompt)
