"""Parameters that distinguish pre-norm decoders. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from octavo.nn.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer with grouped-query attention and a gated SiLU feed-forward.

    An architecture that would need more than 15 fields here gets a separate file, built from the same layers.

    Attributes:
        windows: each layer's sliding window in tokens; None for full attention.
        biases: those of "qkv", "o" and "mlp" that have biases.
        qk_norm: whether each head's queries and keys are RMS-normalized before they are rotated.
        tied: whether the output head is the embedding table.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    biases: frozenset[str] = field(default=frozenset())
    qk_norm: bool = False
    tied: bool = False

    def without_windows(self) -> DecoderSpec:
        """Return the spec with full attention in all layers, for sequences shorter than any window."""
        narrowest = min((window for window in self.windows if window is not None), default=None)
        if narrowest is None:
            return self
        rope = replace(self.rope, max_position=min(self.rope.max_position, narrowest))
        return replace(self, windows=(None,) * self.num_layers, rope=rope)

    @property
    def max_position(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.rope.max_position
