"""`Singles` and `Ragged`: batches at fixed addresses, the inputs of recorded steps.

A batch of one token per row is a list of slots. A batch with prompts has its whole layout in one array, sent in one
transfer. Both are padded by rows of slot `num_slots`, which have length 0 and write nothing.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.core.worker_info import MOST_DRAFTED
from octavo.device.transfer import upload
from octavo.nn.attention.recordable import Recordable
from octavo.nn.step import SharedContexts, StepInput
from octavo.worker.drafts import DraftRows
from octavo.worker.parts import Forward
from octavo.worker.resident.sharing import Groups, shared_room
from octavo.worker.resident.slots import DeviceBatch, DeviceSlots, empty_step, first_of

MAX_TOKENS, MAX_VARIED_TOKENS = 1024, 2048
"""Longer steps with prompts are not recorded, since launching them takes no longer than computing them. A feature's
variant of the model has more to launch."""
_MAX_PROMPTS = 16
"""Most prompts in a recorded step. Steps with more are launched operation by operation."""
_SHARING = (8, 16, 32, 64, 128, 192, 256, 384, 512)
"""Batch sizes with a recording for contexts with common prefixes."""


def token_counts(max_tokens: int, *, varied: bool = False) -> list[int]:
    """Return the token counts of steps with prompts to record, ascending, up to `max_tokens`. The smaller ones are
    batch sizes of decoding, too.

    Args:
        varied: of variants of the model.
    """
    most = min(max_tokens, most_tokens(varied=varied))
    wanted = [16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)]
    return [count for count in wanted if count <= most]


def most_tokens(*, varied: bool) -> int:
    """Return the most tokens of a recorded step with prompts."""
    return MAX_VARIED_TOKENS if varied else MAX_TOKENS


def draft_counts(max_tokens: int, max_drafts: int, max_rows: int) -> list[int]:
    """Return the token counts of steps with drafts to record, ascending: up to 64 rows with all their drafts, and 512
    tokens."""
    most, longest = (1 + max_drafts) * min(max_rows, MOST_DRAFTED), max(token_counts(max_tokens), default=0)
    wanted = [count for count in (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512) if count <= longest]
    return [count for i, count in enumerate(wanted) if i == 0 or wanted[i - 1] < most]


def least(sorted_sizes: Sequence[int], wanted: int) -> int:
    """Return the smallest of the sizes that is at least `wanted`; 0 if none is."""
    index = bisect.bisect_left(sorted_sizes, wanted)
    return sorted_sizes[index] if index < len(sorted_sizes) else 0


class Singles:
    """Batches of one token per row. Every recorded size uses the beginning of the buffers.

    Attributes:
        sizes: recorded numbers of rows, ascending.
        sharing: sizes that also have a recording for contexts with common prefixes.
        rows: [largest size] int32, the slots.
    """

    def __init__(self, slots: DeviceSlots, attention: Recordable, sizes: list[int], *, shares: bool) -> None:
        device = slots.device
        self.sizes = sizes
        largest = self.sizes[-1]
        self._slots = slots
        self._most, self._unit = attention.sharing()
        self.rows = torch.full((largest,), slots.num_slots, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._buffers = empty_step(largest, largest, device)
        self._cells = slots.cells(largest)
        self.sharing = [size for size in _SHARING if size in self.sizes and shares and self._most > 1]
        room = shared_room(self.sharing[-1], self._most) if self.sharing else 0
        self._shared = torch.zeros(room, dtype=torch.int32, device=device)

    @property
    def forward(self) -> Forward | None:
        """What runs the layers in place of the model; None for the model."""
        return None

    def bucket(self, slots: Sequence[int]) -> int:
        """Return the recorded size for a batch; 0 if no recording fits."""
        return least(self.sizes, len(slots))

    def batch(self, size: int) -> DeviceBatch:
        return DeviceBatch(self.rows[:size], self._starts[: size + 1], self._starts[:size])

    def step(self, size: int, *, shares: bool) -> StepInput:
        """Return the input of a recorded step, for `batch(size)`."""
        batch, slots = self.batch(size), self._slots
        step = StepInput(
            **first_of(self._buffers, size, size),
            query_start=batch.query_start,
            block_tables=slots.block_tables[0],
            table_rows=batch.slots,
            logit_rows=self._starts[:size],
            max_query_len=1,
            max_seq_len=slots.max_model_len,
            shared=SharedContexts.of(self._shared[: shared_room(size, self._most)], size) if shares else None,
        )
        slots.divide(step, None if self._cells is None else self._cells[:, :size])
        return step

    def send(self, slots: Sequence[int], size: int) -> None:
        """Send the slots of a batch, padded up to a recorded size."""
        rows = np.full(size, self._slots.num_slots, dtype=np.int32)
        rows[: len(slots)] = slots
        self.rows[:size].copy_(upload(rows, self._slots.device))

    def groups(self, slots: Sequence[int]) -> Groups | None:
        """Return the groups of contexts with common prefixes; None if there are none."""
        return self._slots.shared(slots, self._most, self._unit)

    def send_groups(self, groups: Groups, size: int) -> None:
        """Send the groups of contexts with common prefixes, padded up to a recorded size."""
        shared = groups.padded(size, self._most, self._slots.block_size)
        self._shared[: len(shared)].copy_(upload(shared, self._slots.device))


A = TypeVar("A", Tensor, np.ndarray)


@dataclass(frozen=True, slots=True)
class _LayoutArrays(Generic[A]):
    """The layout of a batch of up to T tokens: parts of one int32 array, on the host or the device.

    The batch's rows are followed by one row that holds all padding tokens, and by empty rows.

    Attributes:
        slots: [T + 2], slots of the rows.
        query_start: [T + 3], index of each row's first token.
        row_of_token: [T].
        logit_rows: [T], indices of the tokens that get logits.
        sample_slots: [T], slots of these tokens.
        single: [T], rows with one query.
        tiles: [2 n], tiles of the other rows.
        behind, unseen: [T] each if drafts branch, else empty; see `DeviceBatch` and `StepInput`.
    """

    slots: A
    query_start: A
    row_of_token: A
    logit_rows: A
    sample_slots: A
    single: A
    tiles: A
    behind: A
    unseen: A

    @classmethod
    def of(cls, packed: A, tokens: int, tiles: int, *, branched: bool) -> _LayoutArrays[A]:
        """Return views of the beginning of `packed`; each part starts at a multiple of 16 bytes."""
        ends = _ends(tokens, tiles, branched=branched)
        return cls(*(packed[begin:end] for begin, end in ends))

    @staticmethod
    def room(tokens: int, tiles: int, *, branched: bool) -> int:
        """Return the length of `packed`."""
        return -(-_ends(tokens, tiles, branched=branched)[-1][1] // 4) * 4


def _ends(tokens: int, tiles: int, *, branched: bool) -> list[tuple[int, int]]:
    """Return the (begin, end) indices of the parts."""
    of_drafts = tokens if branched else 0
    lengths = (tokens + 2, tokens + 3, tokens, tokens, tokens, tokens, 2 * tiles, of_drafts, of_drafts)
    starts = itertools.accumulate((-(-length // 4) * 4 for length in lengths), initial=0)
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


class Ragged:
    """Batches with prompts, by their number of tokens.

    A recording reads the rows of its tokens from the layout. Attention is recorded with as many programs as such a step
    can need; the unneeded ones return at once.

    Attributes:
        counts: recorded numbers of tokens, ascending.
    """

    _takes_branches = False

    def __init__(
        self, slots: DeviceSlots, attention: Recordable, counts: list[int], *, every_token: bool = False
    ) -> None:
        """`every_token`: the step returns the hidden states of all tokens, not only of those that get logits."""
        self.counts = counts
        self._every_token = every_token
        self._slots = slots
        self._attention = attention
        self._branched = self._takes_branches and slots.tree is not None
        if not self.counts:
            return
        device, largest = slots.device, self.counts[-1]
        self._tiles = {count: self._most_tiles(count) for count in self.counts}
        room = _LayoutArrays.room(largest, self._tiles[largest], branched=self._branched)
        self._packed = torch.empty(room, dtype=torch.int32, device=device)
        self._parts = {
            count: _LayoutArrays.of(self._packed, count, self._tiles[count], branched=self._branched)
            for count in self.counts
        }
        self._buffers = empty_step(largest + 2, largest, device)
        self._cells = slots.cells(largest)

    def _most_tiles(self, tokens: int) -> int:
        return self._attention.most_tiles(tokens, _MAX_PROMPTS, self._slots.device)

    def bucket(self, plan: StepPlan) -> int:
        """Return the recorded number of tokens for the plan; 0 if no recording fits."""
        if self._slots.tree is not None and self._slots.tree.branches(plan):
            return 0
        prompts = sum(count > 1 for count in plan.num_tokens)
        return least(self.counts, plan.total_tokens) if prompts <= _MAX_PROMPTS else 0

    def batch(self, size: int) -> DeviceBatch:
        parts = self._parts[size]
        return DeviceBatch(parts.slots, parts.query_start, parts.row_of_token, parts.behind if self._branched else None)

    def sample_slots(self, size: int) -> Tensor:
        """Return the slots of the tokens that get logits, padded: [size] int32."""
        return self._parts[size].sample_slots

    def step(self, size: int) -> StepInput:
        """Return the input of a recorded step, for `batch(size)`."""
        parts, slots = self._parts[size], self._slots
        step = StepInput(
            **first_of(self._buffers, size + 2, size),
            query_start=parts.query_start,
            block_tables=slots.block_tables[0],
            table_rows=parts.slots,
            logit_rows=parts.logit_rows,
            hidden_rows=None if self._every_token else parts.logit_rows,
            max_query_len=size,
            max_seq_len=slots.max_model_len,
            unseen=parts.unseen if self._branched else None,
        )
        slots.divide(step, None if self._cells is None else self._cells[:, :size])
        return step

    def foreseen(self, size: int, step: StepInput) -> object:
        """Return the value of `step.attn`."""
        parts = self._parts[size]
        return self._attention.foreseen(parts.tiles, parts.single, size)

    def send(self, plan: StepPlan | None, size: int) -> None:
        """Send the plan's layout; None sends a batch of padding only."""
        host = np.zeros(_LayoutArrays.room(size, self._tiles[size], branched=self._branched), dtype=np.int32)
        into = _LayoutArrays.of(host, size, self._tiles[size], branched=self._branched)
        into.slots.fill(self._slots.num_slots)
        into.query_start[1:].fill(size)
        into.sample_slots.fill(self._slots.num_slots)
        into.single.fill(size + 1)
        into.tiles[::2] = size + 1
        if plan is not None:
            self._fill(into, plan)
        self._packed[: len(host)].copy_(upload(host, self._slots.device))

    def _fill(self, into: _LayoutArrays[np.ndarray], plan: StepPlan) -> None:
        counts = np.asarray(plan.num_tokens, dtype=np.int32)
        rows, tokens = len(counts), plan.total_tokens
        into.slots[:rows] = plan.slots
        np.cumsum(counts, out=into.query_start[1 : rows + 1])
        into.row_of_token[:tokens] = np.repeat(np.arange(rows, dtype=np.int32), counts)
        into.row_of_token[tokens:] = rows
        if any(plan.num_drafts):
            logit_rows, sample_slots = DraftRows.of(plan).tokens, plan.logit_slots
            into.logit_rows[: len(logit_rows)] = logit_rows
            into.sample_slots[: len(logit_rows)] = sample_slots
            if self._branched and self._slots.tree is not None:
                tree = self._slots.tree
                into.behind[:tokens], into.unseen[:tokens] = (
                    tree.spread(values, plan) for values in (tree.behind, tree.unseen)
                )
        else:
            sampled = np.flatnonzero(plan.samples)
            into.logit_rows[: len(sampled)] = into.query_start[1 + sampled] - 1
            into.sample_slots[: len(sampled)] = into.slots[sampled]
        self._divide(into, counts, plan)

    def _divide(self, into: _LayoutArrays[np.ndarray], counts: np.ndarray, plan: StepPlan) -> None:
        """Divide the rows over the kernels of attention."""
        tiles, single = self._attention.cut(counts, self._slots.past(plan).tolist(), self._slots.device)
        into.tiles[: len(tiles)] = tiles
        into.single[: len(single)] = single


class Drafted(Ragged):
    """Batches of rows with few tokens each, as rows with drafts and those of a drafting model have. Attention reads a
    row's context once, in parts if there are few rows, as in decoding."""

    _takes_branches = True

    def _most_tiles(self, tokens: int) -> int:
        return 0

    def bucket(self, plan: StepPlan) -> int:
        return least(self.counts, plan.total_tokens) if max(plan.num_tokens) <= self._attention.most_few else 0

    def step(self, size: int) -> StepInput:
        step = super().step(size)
        for one in (step, *step.others):
            one.max_query_len = self._attention.most_few
        return step

    def foreseen(self, size: int, step: StepInput) -> object:
        return self._attention.prepare(step, self._slots.block_size)

    def _divide(self, into: _LayoutArrays[np.ndarray], counts: np.ndarray, plan: StepPlan) -> None:
        """Do nothing: one kernel takes all rows."""
