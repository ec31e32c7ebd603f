"""`HostSlots`: the state of running requests in host memory.

In numpy, whose small operations take a fraction of torch's time, since bookkeeping must not delay a step of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.params import LogprobsMode
from octavo.core.plan import NewRow, SampledRow, StepPlan
from octavo.nn.step import StepInput
from octavo.sampling.parameters import STRUCT, packed
from octavo.sampling.state import PreparedParams, SampleRow
from octavo.sampling.verify import verify
from octavo.worker.branches import Branches, in_batch, kept_first
from octavo.worker.drafts import Drafting, DraftRows, Drafts, Following, StoredDrafts
from octavo.worker.held import Held, prompt_rows
from octavo.worker.parts import Layout
from octavo.worker.step import PromptRow

Ints = NDArray[np.int64]

Rows = tuple[Ints, Ints]
"""Slots and token counts of a batch's rows, [R] int64 each."""


class HostSlots:
    """Row s holds the request in slot s. Memory is touched only as rows fill.

    Attributes:
        tokens: [slots, max_model_len] int32, all known tokens, followed by drafts.
        length: [slots] int64, number of known tokens.
        num_drafts: [slots] int64, number of drafts proposed after them.
        computed: [slots] int64, positions whose keys and values are in the cache.
        block_tables: [groups, slots, blocks] int32.
        sampling: [slots] of `STRUCT`, parameters for the native kernels.
        tree: the shape of drafts that branch; None if none do.
        rewinds: see `__init__`.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        num_groups: int = 1,
        *,
        rewinds: bool = False,
        added_tokens: int = 0,
        branches: Branches | None = None,
    ) -> None:
        """
        Args:
            branches: verifies drafts that branch; None if none do.
            added_tokens: most tokens beyond the vocabulary that a request can have.
            rewinds: a row with a rejected draft is computed again, as recurrent states require; see `KVCache.settle`.
        """
        self.num_slots = num_slots
        self.block_size = block_size
        self.tokens = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.num_drafts = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.block_tables = np.zeros((num_groups, num_slots, -(-max_model_len // block_size)), dtype=np.int32)
        self.sampling = np.zeros(num_slots, dtype=STRUCT)
        self._known = torch.from_numpy(self.tokens), torch.from_numpy(self.length)
        self._vocab_size, self._columns = vocab_size, vocab_size + added_tokens
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self.rewinds = rewinds
        self._branches = branches
        self.tree = None if branches is None else branches.tree
        self._held: list[Held | None] = [None] * num_slots
        self._reporting: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        for row in plan.new:
            self._fill(row)
        for slot, group, index, block in plan.block_writes:
            self.block_tables[group, slot, index] = block

    def learn(self, sampled: Sequence[SampledRow]) -> None:
        for one in sampled:
            start = int(self.length[one.slot])
            known = [*one.tokens, *one.drafts]
            room = self.tokens[one.slot, start : start + len(known)]
            room[:] = known[: len(room)]
            self.length[one.slot] += len(one.tokens)
            self.num_drafts[one.slot] = len(one.drafts)
            self.computed[one.slot] -= one.num_rejected

    def lay_out(self, plan: StepPlan) -> Layout[Rows]:
        rows, counts = np.array(plan.slots), np.array(plan.num_tokens)
        computed = self.computed[rows]
        seq_lens = (computed + counts).astype(np.int32)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        counts.cumsum(out=query_start[1:])
        max_query_len, max_seq_len = int(counts.max()), int(seq_lens.max())
        if max_query_len == 1:
            slot_of_token, places = rows, computed
        else:
            row_of_token = np.repeat(np.arange(len(rows)), counts)
            slot_of_token = rows[row_of_token]
            places = computed[row_of_token] + np.arange(len(row_of_token)) - query_start[row_of_token]
        of_groups = [self._cells(table, rows, slot_of_token, places, max_seq_len) for table in self.block_tables]
        tables, cells = of_groups[0]
        logit_rows = query_start[1:].astype(np.int64) - 1
        sampled = plan.slots
        if any(plan.num_drafts):
            logit_rows, sampled = DraftRows.of(plan).tokens, plan.logit_slots
        elif not all(plan.samples):
            chosen = np.flatnonzero(plan.samples)
            logit_rows, sampled = logit_rows[chosen], rows[chosen].tolist()
        batch = StepInput(
            input_ids=torch.from_numpy(self.tokens[slot_of_token, places].astype(np.int64)),
            positions=torch.from_numpy(places),
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(cells),
            logit_rows=torch.from_numpy(logit_rows),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        if len(of_groups) > 1:
            batch.divide(*(torch.from_numpy(np.stack(parts)) for parts in zip(*of_groups, strict=True)))
        if self.tree is not None and self.tree.branches(plan):
            batch.positions = torch.from_numpy(places - self.tree.spread(self.tree.behind, plan))
            batch.unseen = torch.from_numpy(self.tree.spread(self.tree.unseen, plan))
        return Layout(batch, sampled, (rows, counts))

    def _cells(
        self, table: NDArray[np.int32], rows: Ints, slot_of_token: Ints, places: Ints, max_seq_len: int
    ) -> tuple[NDArray[np.int32], Ints]:
        """Return a batch's block tables [R, blocks] in one group, and each token's cell [T] in the group's caches."""
        size = self.block_size
        cells = table[slot_of_token, places // size] * np.int64(size) + places % size
        return table[rows, : -(-max_seq_len // size)], cells

    def prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        if self._reporting.isdisjoint(plan.slots):
            return []
        return prompt_rows(
            plan, self._held, self.computed, lambda slot, a, b: torch.from_numpy(self.tokens[slot, a:b].copy())
        )

    def advance(self, plan: StepPlan, layout: Layout[Rows]) -> None:
        rows, counts = layout.batch
        self.computed[rows] += counts

    def append(self, slots: Sequence[int], tokens: Ints) -> None:
        """Append one sampled token [S] to each of these slots [S]."""
        lengths = self.length[slots]
        self.tokens[slots, np.minimum(lengths, self.tokens.shape[1] - 1)] = tokens
        self.length[slots] = lengths + 1

    def accept(self, plan: StepPlan, drawn: Ints) -> tuple[list[int], Tensor | None]:
        """Verify a step's drafts and append the tokens that are kept.

        Args:
            drawn: [S], the tokens drawn after no draft and after each one; -1 where none could be drawn. Reordered in
                place, so that each row's tokens that are kept come first.

        Returns:
            The number of tokens appended for each sampling row, and `Drawn.order`.
        """
        rows = DraftRows.of(plan)
        slots, most = rows.slots, int(rows.drafts.max())
        length = self.length[slots]
        places = np.minimum(length[:, None] + np.arange(1 + most), self.tokens.shape[1] - 1)
        drafts = self.tokens[slots[:, None], places[:, :most]]
        counts = np.minimum(self.num_drafts[slots], rows.drafts)
        parts = [torch.from_numpy(part) for part in (drawn, drafts, counts, rows.starts)]
        in_order: Tensor | None = None
        if self._branches is not None and self._branches.tree.branches(plan):
            verified, paths = self._branches.verify(*parts)
            self._branches.settle(verified, paths, torch.from_numpy(length), self.tables_of(torch.from_numpy(slots)))
            first = kept_first(len(drawn), parts[3], verified, paths)
            drawn[:] = drawn[first.numpy()]
            in_order = in_batch(first, torch.from_numpy(rows.tokens), plan.total_tokens)
        else:
            verified = verify(*parts)
        kept = verified.numpy()
        row, order = np.nonzero(np.arange(1 + most) < kept[:, None])
        self.tokens[slots[row], places[row, order]] = np.maximum(drawn[rows.starts[row] + order], 0)
        self.length[slots] += kept
        rejected = 1 + rows.drafts - kept
        if self.rewinds:
            rejected[rejected > 0] = np.array(plan.num_tokens)[np.flatnonzero(plan.samples)][rejected > 0]
        self.computed[slots] -= rejected
        return kept.tolist(), in_order

    def drafting(self, plan: StepPlan) -> Drafting:
        rows = list(plan.proposals)
        slots, limits = np.array([plan.slots[row] for row in rows]), np.array(list(plan.proposals.values()))
        return Drafting(plan, rows, torch.from_numpy(slots), torch.from_numpy(limits), *self._known)

    def draft(self, drafting: Drafting, drafts: Drafts | None) -> Callable[[], StoredDrafts]:
        stored = StoredDrafts({})
        plan = drafting.plan
        found = [0] * len(drafting.rows) if drafts is None else drafts.counts.tolist()
        tokens = None if drafts is None else drafts.tokens.numpy()
        for at, (row, limit) in enumerate(plan.proposals.items()):
            slot, count = plan.slots[row], min(found[at], limit)
            start = self.length[slot]
            room = self.tokens[slot, start : start + limit]
            room[:] = 0  # padding must be a token, too
            if tokens is not None and count:
                room[:count] = np.minimum(np.maximum(tokens[at, :count], 0), self._vocab_size - 1)
            self.num_drafts[slot] = stored.counts[row] = count
            if plan.reports_drafts:
                stored.tokens[row] = room[:count].tolist()
        return lambda: stored

    def follow(self, where: Following) -> None:
        """Continue these slots elsewhere: take over their last tokens, lengths and computed positions."""
        where.write(*(torch.from_numpy(part) for part in (self.tokens, self.length, self.computed)))

    def resume(self, slot: int, start: int, tokens: NDArray[np.int32], computed: int) -> None:
        """Set a slot's known tokens from place `start` on, and how many positions are computed."""
        end = start + len(tokens)
        self.tokens[slot, start:end] = tokens
        self.length[slot], self.computed[slot] = end, computed

    def tables_of(self, slots: Tensor) -> Tensor:
        """Return the block tables of these slots [D] in the first group, [D, blocks] int32."""
        return torch.from_numpy(self.block_tables[0, slots.numpy()])

    def known(self) -> tuple[Tensor, Tensor]:
        """Return `tokens` and `length` as tensors on the device, which must not be changed."""
        return self._known

    def retract(self, slots: Sequence[int]) -> None:
        """Drop the last token of each of these slots."""
        self.length[slots] -= 1

    def plain(self, slots: Sequence[int]) -> bool:
        """Return whether all these requests sample greedily, without further parameters."""
        return all(params is not None and params.plain for params in self.params(slots))

    def params(self, slots: Sequence[int]) -> list[PreparedParams | None]:
        """Return the sampling parameters of these slots; None for an empty slot."""
        return [None if (one := self._held[slot]) is None else one.params for slot in slots]

    def sample_rows(self, slots: Sequence[int], ahead: Ints | None = None) -> list[SampleRow]:
        """Return the samplers' input for these slots, with `ahead` [S] drafts as their last tokens; None for none."""
        rows = []
        lengths = self.length[slots] if ahead is None else self.length[slots] + ahead
        for slot, length in zip(slots, lengths.tolist(), strict=True):
            held = self._held[slot]
            if held is None:
                raise AssertionError(f"slot {slot} is sampled but empty")
            rows.append(SampleRow(held.params, self.tokens[slot, :length], held.num_prompt))
        return rows

    def _fill(self, row: NewRow) -> None:
        slot = row.slot
        self.tokens[slot, : len(row.tokens)] = row.tokens
        self.length[slot] = len(row.tokens)
        self.num_drafts[slot] = 0
        self.computed[slot] = row.num_computed
        for group, blocks in enumerate(row.blocks):
            self.block_tables[group, slot, : len(blocks)] = np.maximum(blocks, 0)  # NO_BLOCK is never read
        params = PreparedParams.of(row, self._vocab_size, self._logprobs_mode, self._columns)
        self._held[slot] = Held(params, row.num_prompt)
        self.sampling[slot] = packed(params, row.num_prompt)
        self._reporting.discard(slot)
        if params.prompt_logprobs is not None:
            self._reporting.add(slot)
