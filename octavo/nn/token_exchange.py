"""`TokenExchange`: what ranks exchange that each compute some tokens of a step (context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.parallel.mesh import Mesh

if TYPE_CHECKING:
    from octavo.nn.step import StepInput


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """Gives every rank the keys and values of all tokens, so that each rank's KV cache holds all of a sequence.

    Attributes:
        mesh: the ranks that divide the step's tokens.
        counts: tokens of each rank.
        everyone: the step of all tokens, in the order of ranks, of one cache group; for storing only.
    """

    mesh: Mesh
    counts: Sequence[int]
    everyone: StepInput

    def rows(self, x: Tensor) -> tuple[Tensor, StepInput]:
        """Return [all tokens, ...] for this rank's x [T, ...], and the step that stores them."""
        return self.mesh.gather_rows(x, self.counts), self.everyone

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, StepInput]:
        """Return all tokens' keys and values, [all tokens, kv heads, head_dim] each, and the step that stores them.

        Args:
            k, v: of this rank's tokens, [T, kv heads, head_dim], in the form in which the cache stores them.
        """
        found, everyone = self.rows(torch.cat([k, v], dim=1))
        keys, values = found.split(k.shape[1], dim=1)
        return keys, values, everyone
