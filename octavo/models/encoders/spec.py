"""Parameters that distinguish post-norm encoders. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Gate = Literal["gelu", "gelu_tanh", "relu"]
SummaryKind = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Tensor names of a family's checkpoints; the defaults are BERT's.

    Attributes:
        root: prefix of all names in checkpoints with more than the bare encoder.
        qkv: the three projections of attention; `out` is the output projection.
        up, down: the two projections of the feed-forward.
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
    """A classification head: optionally a dense layer with an activation on the pooled state, then the labels.

    Attributes:
        dense, labels: names of the two layers, from the checkpoint's root.
    """

    labels: str
    dense: str | None = None
    activation: Literal["tanh", "relu"] = "tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """A transformer encoder with learned positions, whose norms follow the residual sums (Devlin et al. 2018).

    Attributes:
        num_positions: rows of the position table; the first position is at row `position_offset`.
        token_types: rows of the token type table; 0 for no such table.
        num_labels: outputs of the head, if any.
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
    def summary(self) -> SummaryKind:
        """Pooling: the hidden states that represent the prompt, for the classification head too."""
        return "cls"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.num_positions - self.position_offset
