"""Kinds of mixers, as entries of `DecoderSpec.mixers`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from octavo.native.recurrent import MOST_TAPS


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """The part of a layer that passes information between tokens. Each kind is a subclass with the parameters that
    `DecoderSpec` does not have, and a line in `table.py`."""

    @property
    def path(self) -> str:
        """The mixer's place below its layer; `DecoderSpec.stored` maps a checkpoint's own names to it."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        """Values of a token that the mixer projects to, for sizing memory; 0 for attention, which `DecoderSpec`
        describes."""
        return 0

    @property
    def state_bytes(self) -> int:
        """Bytes of what the mixer keeps of a sequence, apart from keys and values."""
        return 0

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this mixer; None if it has an `emit`."""
        return f"mixers of the kind {type(self).__name__}"

    def of_rank(self, ranks: int) -> Self | None:
        """Return the parameters of a rank's share; None if the mixer can't be divided over them. Attention divides
        by the heads that `DecoderSpec` has."""
        return self


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + first) / interval)), so that attention stays sharp
    in long contexts (https://arxiv.org/abs/2501.19399)."""

    interval: int
    scale: float
    first: int = 1

    @property
    def in_program(self) -> tuple[float, int, int]:
        """The parameters as a native program takes them."""
        return self.scale, self.interval, self.first


@dataclass(frozen=True, slots=True)
class SelfAttention(MixerSpec):
    """Grouped-query attention; its other parameters are fields of `DecoderSpec`.

    Attributes:
        gated: each head's output is multiplied by the sigmoid of a gate.
        gates_heads: there is one gate for a head, instead of one for each of its channels.
        normed: queries and keys have `DecoderSpec.head_norms`, if there are any.
        temperature: None for none.
        kv_heads, head_dim: in place of `DecoderSpec`'s; 0 for those.
    """

    gated: bool = False
    gates_heads: bool = False
    normed: bool = True
    temperature: Temperature | None = None
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def path(self) -> str:
        return "self_attn"

    @property
    def lacking(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class SharedSelfAttention(SelfAttention):
    """Attention of the layer's own queries over the keys and values that an earlier layer keeps (Gemma 3n and 4).

    Attributes:
        source: number of that layer, which has heads of the same form, and the same window.
    """

    source: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSelfAttention(MixerSpec):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434): keys and values of all heads are
    made from one vector per token, which is all that is kept. `DecoderSpec` has the number of heads and the scale.

    Attributes:
        rank: channels of that vector, without the rotated ones.
        rope_dim, nope_dim: rotated and other channels of queries and keys; the rotated channels of a key are shared by
            all heads.
        value_dim: channels of values.
        query_rank: channels of the vector that queries are made from; 0 if they are projected at once.
        bias: of the projections to vectors of low rank, and of the output's.
        norm_eps: of the norms of these vectors.
        temperature: None for none.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int = 0
    bias: bool = False
    norm_eps: float = 1e-6
    temperature: Temperature | None = None

    @property
    def path(self) -> str:
        return "self_attn"

    @property
    def lacking(self) -> str | None:
        widths = (self.rank, self.rope_dim, self.nope_dim, self.value_dim, self.query_rank)
        return "latent attention with widths that are not multiples of 16" if any(w % 16 for w in widths) else None

    @property
    def query_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim

    def leading(self, module: str) -> int | None:
        """Return the channels in front of the rotated ones, in each head of a module's outputs; None if the module has
        no rotated outputs."""
        return {"q_proj": self.nope_dim, "q_b_proj": self.nope_dim, "kv_a_proj_with_mqa": self.rank}.get(module)


ATTENTION = SelfAttention()


def lacking_taps(taps: int) -> str | None:
    """Return what the CPU's native program lacks for a convolution; None for nothing."""
    return f"convolutions over more than {MOST_TAPS} tokens" if taps > MOST_TAPS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(MixerSpec):
    """The mixer of Mamba-2 (https://arxiv.org/abs/2405.21060).

    Attributes:
        heads, head_dim: of the state space.
        state: numbers of a state per channel.
        groups: heads of a group have the same inputs to and outputs from their states.
        taps: of the causal convolution.
        conv_bias, bias: whether the convolution, and the projections, have biases.
        limits: of step sizes.
        norm_eps: of the gated norm behind the state space.
    """

    heads: int
    head_dim: int
    state: int
    groups: int = 1
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    norm_eps: float = 1e-5

    @property
    def path(self) -> str:
        return "mamba"

    @property
    def lacking(self) -> str | None:
        return lacking_taps(self.taps)

    @property
    def width(self) -> int:
        return self.inner + self.convolved + self.heads

    @property
    def state_bytes(self) -> int:
        return 4 * (self.convolved * (self.taps - 1) + self.inner * self.state)

    @property
    def inner(self) -> int:
        """Channels of the state space."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the state space's, and the inputs to and outputs from states."""
        return self.inner + 2 * self.groups * self.state

    def of_rank(self, ranks: int) -> Self | None:
        if self.heads % ranks or (self.groups % ranks and ranks % self.groups):
            return None
        return replace(self, heads=self.heads // ranks, groups=max(1, self.groups // ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(MixerSpec):
    """The mixer of Mamba (https://arxiv.org/abs/2312.00752).

    Attributes:
        inner: channels of the state space.
        state: numbers of a state per channel.
        rank: of the projection to step sizes.
        taps: of the causal convolution.
        conv_bias, bias: whether the convolution, and the projections, have biases.
        norm_eps: of norms of step sizes and of inputs to and outputs from states; None for no norms.
        norm_scaled: whether these norms have weights.
    """

    inner: int
    state: int
    rank: int
    taps: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm_eps: float | None = None
    norm_scaled: bool = True

    @property
    def path(self) -> str:
        return "mamba"

    @property
    def lacking(self) -> str | None:
        return lacking_taps(self.taps)

    @property
    def width(self) -> int:
        return 2 * self.inner

    @property
    def state_bytes(self) -> int:
        return 4 * self.inner * (self.taps - 1 + self.state)

    def of_rank(self, ranks: int) -> Self | None:
        return None if self.inner % ranks else replace(self, inner=self.inner // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec(MixerSpec):
    """The gated delta net (https://arxiv.org/abs/2412.06464).

    Attributes:
        key_heads, key_dim: of queries and keys.
        heads, head_dim: of values; a multiple of `key_heads`.
        taps: of the causal convolution.
    """

    key_heads: int
    key_dim: int
    heads: int
    head_dim: int
    taps: int = 4

    @property
    def path(self) -> str:
        return "linear_attn"

    @property
    def lacking(self) -> str | None:
        return lacking_taps(self.taps)

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.head_dim

    @property
    def width(self) -> int:
        return self.convolved + self.heads * (self.head_dim + 2)

    @property
    def state_bytes(self) -> int:
        return 4 * (self.convolved * (self.taps - 1) + self.heads * self.key_dim * self.head_dim)

    def of_rank(self, ranks: int) -> Self | None:
        if self.heads % ranks or (self.key_heads % ranks and ranks % self.key_heads):
            return None
        return replace(self, heads=self.heads // ranks, key_heads=max(1, self.key_heads // ranks))


@dataclass(frozen=True, slots=True)
class ShortConvSpec(MixerSpec):
    """A gated causal convolution over all channels of the model (LFM2).

    Attributes:
        channels: those of the model.
        taps: of the convolution.
        bias: whether the convolution and the projections have biases.
    """

    channels: int
    taps: int
    bias: bool = False

    @property
    def path(self) -> str:
        return "conv"

    @property
    def lacking(self) -> str | None:
        return lacking_taps(self.taps)

    @property
    def width(self) -> int:
        return 3 * self.channels

    @property
    def state_bytes(self) -> int:
        return 4 * self.channels * (self.taps - 1)

    def of_rank(self, ranks: int) -> Self | None:
        return None if self.channels % ranks else replace(self, channels=self.channels // ranks)
