"""`Recordable`: what a graph of steps needs of an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from octavo.nn.step import StepInput


@runtime_checkable
class Recordable(Protocol):
    """A backend that never reads device data on the host. Rows of length 0 are padding."""

    @property
    def most_few(self) -> int:
        """Most queries of a row for which `prepare` reads nothing on the host if no row has more."""
        ...

    def prepare(self, step: StepInput, block_size: int) -> object:
        """Do the host work of a step, once for all layers; return the value of `step.attn`."""
        ...

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """Divide rows into tiles.

        Args:
            lens: queries of each row.
            past: tokens of each row before this step.

        Returns:
            [2 n] int32: tiles of the rows with several queries, each as (row, first query in it); and [m] int32: the
            rows with one query.
        """
        ...

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """Return the most tiles for `rows` rows with several queries and `tokens` tokens in total."""
        ...

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> object:
        """Return the value of `step.attn` for a recorded step. Before each replay, the tensors get the results of
        `cut`.

        Unused entries must name a row without queries. No row may have more than `longest` queries.
        """
        ...

    def sharing(self) -> tuple[int, int]:
        """Return the most rows in a group of `StepInput.shared`, and the number of tokens that its lengths must be
        multiples of."""
        ...
