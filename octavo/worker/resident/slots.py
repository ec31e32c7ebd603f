"""`DeviceSlots`: the state of running requests on the device, and the host's mirror of the part that launches need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.cache_groups import FULL, CacheGroup, GroupKind
from octavo.core.draft_tree import DraftTree
from octavo.core.params import LogprobsMode
from octavo.core.plan import NewRow, SampledRow, StepPlan
from octavo.device.launch_sizes import cdiv
from octavo.device.transfer import upload, upload_parts
from octavo.nn.step import StepInput
from octavo.sampling.parameters import NUM_PARAMS, packed_words
from octavo.sampling.resident import ParamTable, ResidentRow
from octavo.sampling.resident_drafts import DraftRow
from octavo.sampling.state import PreparedParams
from octavo.worker.branches import Branches
from octavo.worker.drafts import Drafting, DraftRows, Drafts, Following, StoredDrafts
from octavo.worker.held import Held, prompt_rows
from octavo.worker.parts import Layout
from octavo.worker.resident.drafts import DeviceDrafts
from octavo.worker.resident.sharing import BlockTables, Groups
from octavo.worker.resident.triton_rows import (
    advance_kernel,
    append_kernel,
    cells_kernel,
    extend_kernel,
    fill_kernel,
    layout_kernel,
)
from octavo.worker.step import PromptRow

_FILL_BLOCK = 1024
_BLOCK = 256
_HEADER = 6 + NUM_PARAMS
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's rows on the device.

    Attributes:
        slots: [R] int32; `num_slots` marks a row of padding.
        query_start: [R + 1] int32.
        row_of_token: [T] int32.
        behind: [T] int32, places that each token is stored behind its position; None if drafts don't branch.
    """

    slots: Tensor
    query_start: Tensor
    row_of_token: Tensor
    behind: Tensor | None = None


class DeviceSlots:
    """Row s holds the request in slot s; row `num_slots` is for padding. The host never reads them back.

    The host mirrors `computed` and the block tables, which follow from the plans alone.

    Attributes:
        tokens: [num_slots + 1, max_model_len] int32.
        length, computed: [num_slots + 1] int32.
        block_tables: [groups, num_slots + 1, blocks] int32.
        params: [num_slots + 1, NUM_PARAMS] int32.
        tables: the host's copy of the block tables of one group, used to find contexts with a common beginning: the
            first FULL group if there is one. All FULL groups share and copy blocks alike.
        drafts: stores drafts; None if no feature drafts.
        tree: the shape of drafts that branch; None if none do.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        groups: Sequence[CacheGroup] = FULL,
        *,
        drafts: bool = False,
        added_tokens: int = 0,
        branches: Branches | None = None,
    ) -> None:
        """Allocate the tables; those for drafts only if a feature `drafts`.

        Args:
            branches: verifies drafts that branch; None if none do.
            added_tokens: most tokens beyond the vocabulary that a request can have.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        max_blocks = -(-max_model_len // block_size)
        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.device = device
        self.tokens = zeros(num_slots + 1, max_model_len)
        self.length = zeros(num_slots + 1)
        self.computed = zeros(num_slots + 1)
        self.block_tables = zeros(len(groups), num_slots + 1, max_blocks)
        self.params = zeros(num_slots + 1, NUM_PARAMS)
        self.vocab_size, self._columns = vocab_size, vocab_size + added_tokens
        self._logprobs_mode: LogprobsMode = logprobs_mode
        full = [number for number, group in enumerate(groups) if group.kind is GroupKind.FULL]
        self.tables = BlockTables(num_slots, max_blocks, full[0] if full else 0)
        self._computed = np.zeros(num_slots + 1, dtype=np.int64)
        self._held: list[Held | None] = [None] * num_slots
        self._reporting: set[int] = set()
        self._plain_from = np.zeros(num_slots, dtype=np.int64)
        """Per slot: the number of known tokens from which on it is sampled plainly; see `ResidentRow.plain`."""
        self.drafts = DeviceDrafts(self, branches) if drafts else None
        self.tree = None if branches is None else branches.tree
        self._indices: tuple[Sequence[int], NDArray[np.int64]] = [], np.zeros(0, dtype=np.int64)

    @property
    def table(self) -> ParamTable:
        return ParamTable(self.params, self.tokens, self.length)

    def apply(self, plan: StepPlan) -> None:
        if plan.new:
            self._fill(plan.new)
        if plan.block_writes:
            self.tables.write(plan.block_writes)
            writes = np.asarray(plan.block_writes, dtype=np.int32)
            if len(self.block_tables) > 1:
                writes[:, 0] += writes[:, 1] * (self.num_slots + 1)
            self._extend(writes[:, [0, 2, 3]])

    def learn(self, sampled: Sequence[SampledRow]) -> None:
        if self.drafts is not None and any(one.num_drafts or one.drafts for one in sampled):
            self.drafts.learn(sampled)
            return
        slots, tokens = np.array([(one.slot, one.tokens[0]) for one in sampled], dtype=np.int32).T
        self.append(*upload_parts([slots, tokens], self.device))

    def _extend(self, writes: NDArray[np.int32]) -> None:
        """Write (row, index, block) entries [n, 3] of the block tables; group g's rows begin at g * (num_slots + 1)."""
        count = len(writes)
        extend_kernel[(cdiv(count, _BLOCK),)](
            upload(writes.ravel(), self.device), self.block_tables, count, self.block_tables.stride(1), BLOCK=_BLOCK
        )

    def lay_out(self, plan: StepPlan) -> Layout[DeviceBatch]:
        batch, logit_rows, sample_slots, unseen = make_batch(plan, self.device, self.tree)
        past = self.past(plan)
        sure = self.drafts is None or not self.drafts.unsure[plan.slots].any()
        step = StepInput(
            **empty_step(len(plan.slots), plan.total_tokens, self.device),
            query_start=batch.query_start,
            block_tables=self.block_tables[0],
            table_rows=batch.slots,
            logit_rows=logit_rows,
            max_query_len=max(plan.num_tokens),
            max_seq_len=int((past + plan.num_tokens).max()),
            query_lens=plan.num_tokens,
            past_lens=past.tolist() if sure else None,
            unseen=unseen,
        )
        self.divide(step, self.cells(plan.total_tokens))
        self.write_step(batch, step)
        return Layout(step, sample_slots, batch)

    def cells(self, tokens: int) -> Tensor | None:
        """Allocate `slot_mapping` for all groups, [groups, tokens] int64; return None if there is one group."""
        groups = len(self.block_tables)
        return torch.empty(groups, tokens, dtype=torch.int64, device=self.device) if groups > 1 else None

    def divide(self, step: StepInput, cells: Tensor | None) -> None:
        """Give each cache group its own tables and cells; `cells` is what the method of that name returned."""
        if cells is not None:
            step.divide(self.block_tables, cells)

    def past(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return [R] int64: positions of each of the plan's rows that were computed before this plan.

        Upper bounds while drafts are in flight.
        """
        return self._computed[self._rows(plan.slots)]

    def _rows(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Return the slots as an index array, cached while they stay the same."""
        if self._indices[0] is not slots and self._indices[0] != slots:
            self._indices = slots, np.asarray(slots, dtype=np.int64)
        return self._indices[1]

    def shared(self, slots: Sequence[int], most: int, tokens: int) -> Groups | None:
        """Return the groups of contexts with common prefixes; None if there are none.

        Args:
            most: most rows in a group.
            tokens: shared prefixes are multiples of this many tokens.
        """
        page = self.block_size
        whole_blocks = self._computed[slots] // page
        return self.tables.groups(slots, whole_blocks, most, math.lcm(tokens, page) // page)

    def plain(self, plan: StepPlan) -> bool:
        """Return whether all rows that sample are sampled plainly, without processors. Call after `advance`."""
        rows = self._rows(plan.slots)
        known = self._computed[rows] if self.drafts is None else self._computed[rows] - self.drafts.unsure[rows]
        plain = known >= self._plain_from[rows]
        return bool(plain.all()) or bool(plain[np.asarray(plan.samples)].all())

    def sample_rows(self, plan: StepPlan) -> list[ResidentRow]:
        """Return the host's data of the rows that sample. Call after `advance`."""
        rows = []
        for slot, samples in zip(plan.slots, plan.samples, strict=True):
            if samples:
                held = self._held[slot]
                if held is None:
                    raise AssertionError(f"slot {slot} is sampled but empty")
                rows.append(ResidentRow(slot, held.params, held.num_prompt, int(self._computed[slot])))
        return rows

    def draft_rows(self, plan: StepPlan) -> list[DraftRow] | None:
        """Return the rows of logits with bounds of their lengths; None if these are known. Call after `advance`."""
        if self.drafts is None or not self.drafts.unsure[plan.slots].any():
            return None
        rows: list[DraftRow] = []
        for slot, drafts, samples in zip(plan.slots, plan.num_drafts, plan.samples, strict=True):
            held, unsure = self._held[slot], int(self.drafts.unsure[slot])
            if samples:
                if held is None:
                    raise AssertionError(f"slot {slot} is sampled but empty")
                least = int(self._computed[slot]) - unsure
                most = unsure - drafts
                for ahead in range(1 + drafts) if self.tree is None else self.tree.ahead(drafts):
                    rows.append(DraftRow(len(rows), held.params, held.num_prompt, least + ahead, most))
        return rows

    def drafting(self, plan: StepPlan) -> Drafting:
        assert self.drafts is not None, "no feature drafts"
        return self.drafts.drafting(plan)

    def draft(self, drafting: Drafting, drafts: Drafts | None) -> Callable[[], StoredDrafts]:
        assert self.drafts is not None, "no feature drafts"
        return self.drafts.draft(drafting, drafts)

    def follow(self, where: Following) -> None:
        """Continue these slots elsewhere: take over their last tokens, lengths and computed positions."""
        where.write(self.tokens, self.length, self.computed)
        rows = np.asarray(where.slots, dtype=np.int64)
        if where.counts is not None:
            self._computed[rows] = where.most_length - where.most_counts
        if self.drafts is not None:
            self.drafts.unsure[rows] = where.most_length - where.least_length

    def tables_of(self, slots: Tensor) -> Tensor:
        """Return the block tables of these slots [D] in the first group, [D, blocks] int32."""
        return self.block_tables[0].index_select(0, slots)

    def known(self) -> tuple[Tensor, Tensor]:
        """Return `tokens` and `length`, which must not be changed."""
        return self.tokens, self.length

    def prompt_rows(self, plan: StepPlan) -> list[PromptRow]:
        if self._reporting.isdisjoint(plan.slots):
            return []
        return prompt_rows(plan, self._held, self._computed, lambda slot, a, b: self.tokens[slot, a:b])

    def advance(self, plan: StepPlan, layout: Layout[DeviceBatch]) -> None:
        self.count(layout.batch)
        self.mirror(plan)

    def mirror(self, plan: StepPlan) -> None:
        """Count the tokens of a launched plan in the host's mirror."""
        self._computed[self._rows(plan.slots)] += plan.num_tokens
        if self.drafts is not None:
            self.drafts.unsure[self._rows(plan.slots)] += plan.num_drafts

    def take_back(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Subtract `counts` positions, which held rejected drafts, from the host's mirror."""
        self._computed[slots] -= counts

    def write_step(self, batch: DeviceBatch, into: StepInput) -> None:
        """Write the tokens, positions, cells and lengths of a batch into `into`'s tensors, on the device."""
        rows, tokens = into.num_rows, into.num_tokens
        layout_kernel[(cdiv(max(rows, tokens), _BLOCK),)](
            batch.slots,
            batch.query_start,
            batch.row_of_token,
            batch.row_of_token if batch.behind is None else batch.behind,
            self.tokens,
            self.computed,
            self.block_tables,
            into.input_ids,
            into.positions,
            into.slot_mapping,
            into.seq_lens,
            rows,
            tokens,
            self.num_slots,
            self.tokens.stride(0),
            self.block_tables.stride(1),
            BRANCHES=batch.behind is not None,
            PAGE=self.block_size,
            BLOCK=_BLOCK,
        )
        if into.others:
            cells_kernel[(cdiv(tokens, _BLOCK), len(into.others))](
                batch.slots,
                batch.row_of_token,
                into.positions,
                self.block_tables,
                into.slot_mapping,
                tokens,
                self.num_slots,
                self.block_tables.stride(1),
                *into.group_strides,
                PAGE=self.block_size,
                BLOCK=_BLOCK,
            )

    def count(self, batch: DeviceBatch) -> None:
        """Count the batch's tokens as computed, on the device."""
        rows = batch.slots.shape[0]
        advance_kernel[(cdiv(rows, _BLOCK),)](
            batch.slots, batch.query_start, self.computed, rows, self.num_slots, BLOCK=_BLOCK
        )

    def append(self, slots: Tensor, sampled: Tensor) -> None:
        """Append one sampled token [S] to each of these slots [S], on the device."""
        count = slots.shape[0]
        append_kernel[(cdiv(count, _BLOCK),)](
            slots, sampled, self.tokens, self.length, count, self.num_slots, self.tokens.stride(0), BLOCK=_BLOCK
        )

    def _fill(self, new: list[NewRow]) -> None:
        headers = np.zeros((len(new), _HEADER), dtype=np.int32)
        pieces: list[np.ndarray] = [headers.reshape(-1)]
        offset = headers.size
        longest = 1
        for header, row in zip(headers, new, strict=True):
            params = PreparedParams.of(row, self.vocab_size, self._logprobs_mode, self._columns)
            self._held[row.slot] = Held(params, row.num_prompt)
            self._computed[row.slot] = row.num_computed
            if self.drafts is not None:
                self.drafts.unsure[row.slot] = 0
            self._note(row.slot, params, row.num_prompt)
            self.tables.fill(row)
            count, blocks = len(row.tokens), len(row.blocks[0])
            header[:6] = row.slot, count, row.num_computed, offset, offset + count, blocks
            header[6:] = packed_words(params, row.num_prompt)
            pieces += [np.asarray(row.tokens, dtype=np.int32), np.maximum(np.asarray(row.blocks[0], dtype=np.int32), 0)]
            offset += count + blocks
            longest = max(longest, count, blocks)
        packed = upload(np.concatenate(pieces), self.device)
        fill_kernel[(len(new), cdiv(longest, _FILL_BLOCK))](
            packed,
            packed,
            self.tokens,
            self.length,
            self.computed,
            self.block_tables,
            self.params,
            self.tokens.stride(0),
            self.block_tables.stride(1),
            HEADER=_HEADER,
            PARAMS=NUM_PARAMS,
            BLOCK=_FILL_BLOCK,
        )
        if len(self.block_tables) > 1:
            self._fill_others(new)

    def _fill_others(self, new: list[NewRow]) -> None:
        """Write the block tables of the groups after the first."""
        entries = [
            (row.slot + group * (self.num_slots + 1), index, max(block, 0))
            for row in new
            for group, blocks in enumerate(row.blocks[1:], start=1)
            for index, block in enumerate(blocks)
        ]
        if entries:
            self._extend(np.array(entries, dtype=np.int32))

    def _note(self, slot: int, params: PreparedParams, num_prompt: int) -> None:
        """Record how the slot's steps must be launched."""
        banned = len(params.banned_ids) > 0
        self._plain_from[slot] = (num_prompt + params.min_tokens if banned else 0) if params.drawn else _NEVER
        self._reporting.discard(slot)
        if params.prompt_logprobs is not None:
            self._reporting.add(slot)


def make_batch(
    plan: StepPlan, device: torch.device, tree: DraftTree | None
) -> tuple[DeviceBatch, Tensor, Tensor, Tensor | None]:
    """Send the plan's layout to the device, in one transfer.

    Returns:
        The batch; the indices of the tokens that get logits, [S] int32; their slots, [S] int32; and `StepInput.unseen`.
    """
    counts = np.asarray(plan.num_tokens, dtype=np.int32)
    slots = np.asarray(plan.slots, dtype=np.int32)
    start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=start[1:])
    samples = np.asarray(plan.samples, dtype=bool)
    logit_rows, sampled = start[1:][samples] - 1, slots[samples]
    if any(plan.num_drafts):
        rows = DraftRows.of(plan)
        logit_rows, sampled = rows.tokens.astype(np.int32), np.array(plan.logit_slots, dtype=np.int32)
    row_of_token = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    parts = [slots, start, row_of_token, logit_rows, sampled]
    if tree is not None and tree.branches(plan):
        parts += [tree.spread(tree.behind, plan), tree.spread(tree.unseen, plan)]
    sent = upload_parts(parts, device)
    behind, unseen = sent[5:] if len(sent) > 5 else (None, None)
    return DeviceBatch(sent[0], sent[1], sent[2], behind), sent[3], sent[4], unseen


class StepBuffers(TypedDict):
    """The fields of `StepInput` that `write_step` fills."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor


def empty_step(rows: int, tokens: int, device: torch.device) -> StepBuffers:
    """Allocate the tensors that `write_step` fills, by name."""
    return {
        "input_ids": torch.empty(tokens, dtype=torch.int64, device=device),
        "positions": torch.empty(tokens, dtype=torch.int64, device=device),
        "slot_mapping": torch.empty(tokens, dtype=torch.int64, device=device),
        "seq_lens": torch.empty(rows, dtype=torch.int32, device=device),
    }


def first_of(buffers: StepBuffers, rows: int, tokens: int) -> StepBuffers:
    """Return views of the first rows and tokens of larger buffers."""
    return {
        "input_ids": buffers["input_ids"][:tokens],
        "positions": buffers["positions"][:tokens],
        "slot_mapping": buffers["slot_mapping"][:tokens],
        "seq_lens": buffers["seq_lens"][:rows],
    }
