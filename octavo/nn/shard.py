"""How a linear layer's parts may be divided over devices: declared by the model, never guessed from names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Shard(Enum):
    """COL divides outputs, ROW divides inputs (its partial results must be summed), NONE keeps the layer whole."""

    COL = "col"
    ROW = "row"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Heads:
    """Outputs divide by whole attention heads: the first part has `heads` of them, the others `kv_heads`."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def outputs(self) -> tuple[int, int, int]:
        """Output features of q, k and v."""
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim


COL, ROW, NONE = Shard.COL, Shard.ROW, Shard.NONE
