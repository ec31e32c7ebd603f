"""What distinguishes one post-norm encoder from another. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Gate = Literal["gelu", "gelu_tanh", "relu"]
Summary = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Where a family's checkpoints keep the parts of a layer; the defaults are BERT's.

    Attributes:
        root: what stands before all names in checkpoints that hold more than the bare encoder.
        qkv: the three projections of attention; `out` is the one after it.
        up, down: the two of the feed-forward.
    """

    root: str
    layers: str = "encoder.layer"
    qkv: tuple[str, str, str] = ("attention.self.query", "attention.self.key", "attention.self.value")
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    output_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A classification head: perhaps a dense layer with an activation on the pooled state, then the labels.

    Attributes:
        dense, labels: names of the two layers, from the checkpoint's root.
    """

    labels: str
    dense: str | None = None
    activation: Literal["tanh", "relu"] = "tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A transformer encoder with learnt positions, whose norms follow the residual sums (Devlin et al. 2018).

    Attributes:
        num_positions: rows of the table of positions, the first of which stands at `position_offset`.
        token_types: rows of the table of token types; 0 for no such table.
        num_labels: outputs of the head, if there is one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    num_positions: int
    token_types: int
    norm_eps: float
    activation: Gate
    names: Names
    position_offset: int = 0
    head: Head | None = None
    num_labels: int = 0

    @property
    def summary(self) -> Summary:
        """Whose hidden state stands for the whole prompt, for the classification head as well."""
        return "cls"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position(self) -> int:
        """Tokens that a sequence may have."""
        return self.num_positions - self.position_offset
