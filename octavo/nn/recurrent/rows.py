"""`HostRows`: the rows of a step, for recurrent layers on a CPU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of one token, which are computed together, and rows of several, each computed alone.

    Rows whose tables are found by slots (`StepInput.table_rows`) are those of a device, which has kernels of its own.
    So the shape of every operation that a row takes part in depends on that row only, except for the number of rows.

    Attributes:
        single: rows of one token.
        tokens: the index of each one's token in the batch.
        several: (row, first token, end) of the others.
    """

    single: list[int]
    tokens: list[int]
    several: list[tuple[int, int, int]]

    @classmethod
    def of(cls, step: StepInput) -> HostRows:
        starts = step.query_start.tolist()
        spans = [(row, first, end) for row, (first, end) in enumerate(itertools.pairwise(starts))]
        single = [(row, first) for row, first, end in spans if end - first == 1]
        several = [span for span in spans if span[2] - span[1] > 1]
        return cls([row for row, _ in single], [token for _, token in single], several)


def before(states: Tensor, step: StepInput, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return (states of these rows before the step [n, ...], their blocks [n] int64); zeros where a sequence begins.

    Args:
        states: [blocks, ...], see `StateCache.views`.
        step: that of the layer's cache group.
    """
    blocks = step.block_tables[rows, 0].long()
    begins = (step.seq_lens == step.query_start.diff())[rows]
    return states[blocks].masked_fill_(begins.view(-1, *[1] * (states.dim() - 1)), 0), blocks
