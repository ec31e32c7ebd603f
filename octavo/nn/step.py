"""`StepInput`: one step's batch, the model's input. It is an argument of every layer, never a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo.nn.token_exchange import TokenExchange


@dataclass(frozen=True, slots=True)
class SharedContexts:
    """Groups of rows whose contexts begin with the same KV blocks, which can be read once for all rows of a group.

    Attributes:
        groups: [G, 3] int32: start of the group's rows in `rows`, their number, and the length of their common prefix
            in tokens (0 for unshared rows). Unused groups have no rows.
        rows: [R] int32, the rows, group by group; each row is in one group.
        lens: [R] int32, length of each row's common prefix in tokens.
    """

    groups: Tensor
    rows: Tensor
    lens: Tensor

    @classmethod
    def of(cls, packed: Tensor, rows: int) -> SharedContexts:
        """Return views of [3 G + 2 R] int32: groups, rows and lens, concatenated."""
        groups, order, lens = packed.split([len(packed) - 2 * rows, rows, rows])
        return cls(groups.view(-1, 3), order, lens)


@dataclass(slots=True)
class StepInput:
    """A ragged batch of R rows and T tokens, row by row; S of the tokens get logits.

    Attributes:
        input_ids: [T] int64, token ids.
        positions: [T] int64, each token's position in its own sequence: its place in the cache, unless drafts branch.
        query_start: [R + 1] int32, index of each row's first token in the batch; the last entry is T.
        seq_lens: [R] int32, tokens of each sequence after this step (context plus this step's).
        block_tables: [R, B] int32, KV block ids; entries past a sequence's end are arbitrary valid ids.
        table_rows: [R] int32, index of each row's block table in `block_tables`, which may have more than R rows; None
            if row i has table i.
        slot_mapping: [T] int64, each token's KV cell: block id x block size + offset.
        logit_rows: [S] int64, indices into the batch.
        hidden_rows: [S] int64, the tokens whose hidden states are needed after the last layer's attention; None for
            all.
        max_query_len, max_seq_len: host-side bounds over the rows.
        attn: the attention backend's data for this step.
        token_types: [T] int64, each token's text in a sequence of several texts; None if all are of the first.
        query_lens: each row's tokens in this step, on the host, to avoid reading them from the device.
        past_lens: each row's tokens before this step, on the host.
        unseen: [T] int32, not negative: if bit b is set, the token does not attend to the key b places before its own,
            which is a draft on another path. None: all attend to all keys before them. Without windows and linear
            biases only, since positions then differ from places in the cache.
        ahead: [T] int32, not negative: each token also attends to this many keys of its row after its own, which are of
            this step. Windows end there, too, and begin as for other tokens. None: no token attends to later ones.
        axis_shifts: [T, axes] int32, added to each token's position for its positions along several axes, if the
            model's rotations have them (`RopeSpec.axes`); None adds nothing.
        rotations: [T, width] float32, each token's cosines and sines, in place of the rows of `Rope.cos_sin` at its
            position; `positions` are then rows of this table. None without `axis_shifts`.
        additions: for each of the first layers, [T, hidden_size] that is added to the residual stream after it, and may
            be overwritten then; empty for none. Only of the step, not of `others`.
        shared: common prefixes of rows with one token each; None if there are none worth sharing. Backends may ignore
            it.
        exchange: with the ranks that have the other tokens of the step; None if this one has all.
        others: the step for the layers of each cache group except the first; empty if all share one block table.
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
    unseen: Tensor | None = None
    ahead: Tensor | None = None
    axis_shifts: Tensor | None = None
    rotations: Tensor | None = None
    additions: Sequence[Tensor] = ()
    shared: SharedContexts | None = None
    exchange: TokenExchange | None = None
    others: Sequence[StepInput] = ()

    def of(self, group: int) -> StepInput:
        """Return the step for the layers of a cache group, with their block tables, cells and `attn`."""
        return self.others[group - 1] if group and self.others else self

    def divide(self, block_tables: Tensor, slot_mapping: Tensor) -> None:
        """Give each cache group its tables and cells: the first group this step, each other one a step of its own.

        Args:
            block_tables: [groups, R, B]; each step gets a view of it.
            slot_mapping: [groups, T], likewise.
        """
        self.block_tables, self.slot_mapping = block_tables[0], slot_mapping[0]
        rest = zip(block_tables[1:], slot_mapping[1:], strict=True)
        self.others = [replace(self, block_tables=tables, slot_mapping=cells) for tables, cells in rest]

    def part(
        self,
        tokens: Tensor | slice,
        rows: Tensor | slice,
        *,
        query_start: Tensor,
        query_lens: Sequence[int],
        seq_lens: Tensor,
        past_lens: Sequence[int] | None,
    ) -> StepInput:
        """Return a step with some of the tokens: that of one cache group, without `attn`, `hidden_rows` and `shared`.

        Args:
            tokens: [T'] int32, their indices, row by row; or a range, which takes views of the tensors.
            rows: [R'] int32, the row that each row of the part is of, which may have several pieces; or a range.
            query_start, query_lens, seq_lens, past_lens: of the part, each row ending with its last token.
        """
        own_tables = self.table_rows is None
        return replace(
            self,
            input_ids=_at(self.input_ids, tokens),
            positions=_at(self.positions, tokens),
            slot_mapping=_at(self.slot_mapping, tokens),
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=_at(self.block_tables, rows).contiguous() if own_tables else self.block_tables,
            table_rows=None if self.table_rows is None else _at(self.table_rows, rows),
            query_lens=query_lens,
            past_lens=past_lens,
            max_query_len=max(query_lens),
            token_types=None if self.token_types is None else _at(self.token_types, tokens),
            unseen=None if self.unseen is None else _at(self.unseen, tokens),
            ahead=None if self.ahead is None else _at(self.ahead, tokens),
            axis_shifts=None if self.axis_shifts is None else _at(self.axis_shifts, tokens),
            additions=[_at(one, tokens) for one in self.additions],
            hidden_rows=None,
            shared=None,
            attn=None,
            others=(),
        )

    def rotated_by(self, table: Tensor) -> StepInput:
        """Return the step, and those of its other cache groups, with a row of `rotations` for each token."""
        places = torch.arange(self.num_tokens, device=self.device)
        others = [replace(one, rotations=table, positions=places) for one in self.others]
        return replace(self, rotations=table, positions=places, others=others)

    def addition(self, layer: int, rows: Tensor | None = None) -> Tensor | None:
        """Return what is added to the residual stream after this layer, [T, hidden_size], or for `rows` [S] of it; None
        for nothing."""
        if layer >= len(self.additions):
            return None
        return self.additions[layer] if rows is None else self.additions[layer].index_select(0, rows)

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


def _at(x: Tensor, index: Tensor | slice) -> Tensor:
    """Return entries of the first dimension; a view for a range."""
    return x[index] if isinstance(index, slice) else x.index_select(0, index)
