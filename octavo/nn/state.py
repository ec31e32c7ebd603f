"""`StateCache`: states of a recurrent layer (linear attention, a state space) in the blocks of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.nn.step import StepInput


class StateCache(nn.Module):
    """One block per sequence: the state after all of the sequence's computed tokens. A recurrent layer owns one.

    A step replaces the state in place. The engine does the rest: it copies a block that other requests may read
    (`StepPlan.copies`, done before the layers run), and ends the chunks of a prompt where a state is kept for prefix
    hits. So a layer never takes a snapshot.

    Attributes:
        path: the layer's, in the checkpoint's vocabulary.
        cache: [blocks, ...], the memory shared with the first layers of other groups; the worker binds it.
        group: the layer's cache group; the worker sets it.
    """

    def __init__(
        self, shape: Sequence[int], path: str = "", dtype: torch.dtype = torch.float32, snapshot_tokens: int = 256
    ) -> None:
        """Allocate nothing yet.

        Args:
            shape: of one sequence's state.
            snapshot_tokens: positions between the states that are kept for other requests; the worker rounds it up to
                whole blocks.
        """
        super().__init__()
        self.path = path
        self.cache = torch.empty(0)
        self.group = 0
        self._shape, self._dtype = tuple(shape), dtype
        self._snapshot_tokens = snapshot_tokens

    @property
    def nbytes(self) -> int:
        """Size of one state."""
        return math.prod(self._shape) * self._dtype.itemsize

    def keeps(self, block_size: int) -> CacheGroup:
        """Return the kind of the layer's group."""
        return CacheGroup(GroupKind.STATE, snapshot_tokens=-(-self._snapshot_tokens // block_size) * block_size)

    def load(self, step: StepInput) -> Tensor:
        """Return [R, *shape]: each row's state before this step; zeros for a sequence that begins."""
        states = self._states[self._blocks(step)]
        begins = step.seq_lens == step.query_start.diff()
        return states.masked_fill_(begins.view(-1, *[1] * len(self._shape)), 0)

    def store(self, step: StepInput, states: Tensor) -> None:
        """Keep [R, *shape]: each row's state after this step. Each row has a block of its own."""
        self._states[self._blocks(step)] = states

    @property
    def _states(self) -> Tensor:
        """[blocks, *shape]: a view of the blocks' first bytes."""
        cells = self.cache.flatten(1).view(torch.uint8)[:, : self.nbytes]
        return cells.view(self._dtype).view(-1, *self._shape)

    def _blocks(self, step: StepInput) -> Tensor:
        """[R] int64: each row's block."""
        step = step.of(self.group)
        rows = slice(None) if step.table_rows is None else step.table_rows
        return step.block_tables[rows, 0].long()
