"""`StateCache`: states of a recurrent layer (linear attention, a state space) in the blocks of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from octavo.core.cache_groups import CacheGroup, GroupKind
from octavo.native.recurrent import States
from octavo.nn.step import StepInput

SNAPSHOT_TOKENS = 256
"""Positions between the states of a prompt that are kept for other requests."""


class StateCache(nn.Module):
    """One block per sequence: the state after all of the sequence's computed tokens. A recurrent layer owns one.

    A state consists of one or several tensors, such as a convolution's last inputs and a matrix. A step replaces them
    in place. The engine does the rest: it copies a block that other requests may read (`StepPlan.copies`, done before
    the layers run), and ends the chunks of a prompt where a state is kept for prefix hits. So a layer never takes a
    snapshot.

    Attributes:
        path: the layer's, in the checkpoint's vocabulary.
        cache: [blocks, ...], the memory shared with the first layers of other groups; the worker binds it.
        group: the layer's cache group; the worker sets it.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], path: str = "", snapshot_tokens: int | None = None) -> None:
        """Allocate nothing yet.

        Args:
            shapes: of the tensors of one sequence's state, which are float32.
            snapshot_tokens: positions between the states that are kept for other requests, rounded up to whole blocks;
                None for `SNAPSHOT_TOKENS`.
        """
        super().__init__()
        self.path = path
        self.cache = torch.empty(0)
        self.group = 0
        self._shapes = [tuple(shape) for shape in shapes]
        self._snapshot_tokens = SNAPSHOT_TOKENS if snapshot_tokens is None else snapshot_tokens

    @property
    def nbytes(self) -> int:
        """Size of one state."""
        return 4 * sum(map(math.prod, self._shapes))

    def keeps(self, block_size: int) -> CacheGroup:
        """Return the kind of the layer's group."""
        return CacheGroup(GroupKind.STATE, snapshot_tokens=-(-self._snapshot_tokens // block_size) * block_size)

    def views(self) -> list[Tensor]:
        """Return a view of each of a state's tensors in all blocks: [blocks, *shape] float32."""
        cells = self.cache.flatten(1).view(torch.uint8)[:, : self.nbytes].view(torch.float32)
        parts = cells.split([math.prod(shape) for shape in self._shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def in_program(self) -> list[States]:
        """Return `views` for operations of a native program, which the bound cache must outlive."""
        return [States(view.data_ptr(), view.stride(0)) for view in self.views()]

    def load(self, step: StepInput) -> list[Tensor]:
        """Return each row's state before this step, [R, *shape] each; zeros for a sequence that begins."""
        blocks = self._blocks(step)
        begins = step.seq_lens == step.query_start.diff()
        return [view[blocks].masked_fill_(begins.view(-1, *[1] * (view.dim() - 1)), 0) for view in self.views()]

    def store(self, step: StepInput, states: Sequence[Tensor]) -> None:
        """Keep each row's state after this step, [R, *shape] each. Each row has a block of its own."""
        blocks = self._blocks(step)
        for view, state in zip(self.views(), states, strict=True):
            view[blocks] = state

    def _blocks(self, step: StepInput) -> Tensor:
        """[R] int64: each row's block."""
        step = step.of(self.group)
        rows = slice(None) if step.table_rows is None else step.table_rows
        return step.block_tables[rows, 0].long()
