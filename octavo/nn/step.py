"""`StepInput`: one step's batch as the model sees it. It is an argument of every layer, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedContexts:
    """Which rows have contexts that begin with the same KV blocks, so that these can be read once for all of them.

    Attributes:
        groups: [G, 3] int32: where in `rows` a group's rows begin, how many they are, and how many tokens they have in
            common (0 of a group of strangers). What is left of it has groups of no rows.
        rows: [R] int32, group after group; each row is in one.
        lens: [R] int32, how many tokens each row has in common with its group.
    """

    groups: Tensor
    rows: Tensor
    lens: Tensor

    @classmethod
    def of(cls, packed: Tensor, rows: int) -> SharedContexts:
        """Views of [3 G + 2 R] int32: groups, rows and lens, one after the other."""
        groups, order, lens = packed.split([len(packed) - 2 * rows, rows, rows])
        return cls(groups.view(-1, 3), order, lens)


@dataclass(slots=True)
class StepInput:
    """A ragged batch of R rows and T tokens, row after row; S of the tokens get logits.

    Attributes:
        input_ids: [T] int64, token ids.
        positions: [T] int64, each token's position in its own sequence.
        query_start: [R + 1] int32, where each row's tokens begin in the batch; the last entry is T.
        seq_lens: [R] int32, tokens of each sequence once this step is computed (context plus this step's).
        block_tables: [R, B] int32, KV block ids; entries past a sequence's end are undefined but valid ids.
        table_rows: [R] int32, which row of `block_tables` is each row's own, where that is not the same; the tables may
            then be longer than R.
        slot_mapping: [T] int64, block id x block size + offset: where each token's KV goes.
        logit_rows: [S] int64, indices into the batch.
        hidden_rows: [S] int64, the only tokens whose hidden states are read, where these are not all: past the last
            layer's attention the model computes no others.
        max_query_len, max_seq_len: host-side bounds over the rows.
        attn: what the attention backend prepared for this step.
        token_types: [T] int64, which of several texts in one sequence each token belongs to; None for all the first.
        query_lens: each row's tokens in this step as the host knows them, where reading them off the device would wait.
        past_lens: each row's tokens before this step, as the host knows them.
        shared: what contexts have in common, of rows with one token each; None if nothing, or nothing worth it. A
            backend is free to ignore it.
        others: the step as the layers of each cache group but the first see it; empty where all share one block table.
    """

    input_ids: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    max_query_len: int
    max_seq_len: int
    attn: Any = None
    table_rows: Tensor | None = None
    query_lens: Sequence[int] | None = None
    past_lens: Sequence[int] | None = None
    token_types: Tensor | None = None
    hidden_rows: Tensor | None = None
    shared: SharedContexts | None = None
    others: Sequence[StepInput] = ()

    def of(self, group: int) -> StepInput:
        """The step as the layers of a cache group see it: with their block tables, cells and `attn`."""
        return self.others[group - 1] if group and self.others else self

    def divide(self, block_tables: Tensor, slot_mapping: Tensor) -> None:
        """Give each cache group its tables and cells: the first group this step, each other one a step of its own.

        Args:
            block_tables: [groups, R, B], views of which become the steps' own.
            slot_mapping: [groups, T], likewise.
        """
        self.block_tables, self.slot_mapping = block_tables[0], slot_mapping[0]
        rest = zip(block_tables[1:], slot_mapping[1:], strict=True)
        self.others = [replace(self, block_tables=tables, slot_mapping=cells) for tables, cells in rest]

    @property
    def group_strides(self) -> tuple[int, int]:
        """Entries between two cache groups' block tables, and between their cells; 0 with one group."""
        if not self.others:
            return 0, 0
        second = self.others[0]
        pairs = ((self.block_tables, second.block_tables), (self.slot_mapping, second.slot_mapping))
        tables, cells = ((other.data_ptr() - own.data_ptr()) // own.element_size() for own, other in pairs)
        return tables, cells

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.input_ids.device
