"""The input of attention libraries: adjacent rows of a step, most of them with many queries."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.step import StepInput


@dataclass(slots=True)
class Prompts:
    """Rows [first_row, last_row) of a step.

    Attributes:
        counts: [n] int32 on the host, each row's queries.
        lengths: [n] int32 on the host, each row's keys: earlier ones and those of its queries.
        first_token: index of the rows' first token in the batch.
        query_start: [n + 1] int32 on the device, start of each row's tokens among those of these rows.
        plans: a library's data for this step, used in each layer.
    """

    step: StepInput
    first_row: int
    last_row: int
    counts: np.ndarray
    lengths: np.ndarray
    first_token: int
    query_start: Tensor
    plans: dict[Hashable, Any] = field(default_factory=dict)
    _tables: Tensor | None = None

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + int(self.counts.sum()))

    @property
    def seq_lens(self) -> Tensor:
        """[n] int32 on the device: `lengths`."""
        return self.step.seq_lens[self.first_row : self.last_row]

    @property
    def block_tables(self) -> Tensor:
        """[n, B] int32, contiguous rows."""
        if self._tables is None:
            rows = slice(self.first_row, self.last_row)
            tables, order = self.step.block_tables, self.step.table_rows
            self._tables = (tables[rows] if order is None else tables.index_select(0, order[rows])).contiguous()
        return self._tables


class PromptLibrary(Protocol):
    """One library. Cache contents after a row's last key, even infinities, must not affect its results."""

    name: str

    def attend(self, q: Tensor, cache: Tensor, prompts: Prompts, spec: AttentionSpec) -> Tensor:
        """Compute causal attention of q [T, num_heads, head_dim], the tokens of `prompts`; return the same shape.

        Args:
            cache: [block, key or value, head, offset in the block, channel]; includes this step's keys.
        """
        ...
