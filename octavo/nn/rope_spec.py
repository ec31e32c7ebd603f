"""Rotary embedding of a model's configuration. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are slowed by `factor`, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071). `attention_factor` multiplies cosines and sines."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753): a divisor for each frequency.

    Attributes:
        divisors: [rotary_dim / 2], those in use.
        short: those for contexts of up to `original_max_position` tokens.
        attention_factor: multiplies cosines and sines.
    """

    divisors: tuple[float, ...]
    short: tuple[float, ...]
    original_max_position: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first `pairs` of a head's pairs of channels rotate, as fast as if all did, divided by `factor`."""

    pairs: int
    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """`rotary_dim` channels of each head are rotated; positions are below `max_position`.

    Attributes:
        rotary_dim: 0 for a layer without rotary positions.
        head_dim: 0 for `rotary_dim`. If larger, the other channels are left as they are.
        interleaved: the model pairs channel 2 i with 2 i + 1, not i with i + rotary_dim / 2.
        backwards: the model rotates by negative angles.
        axes: for each pair of channels, the axis along which positions rotate it, if positions have several. Empty if
            there is one axis.
    """

    rotary_dim: int
    max_position: int
    theta: float = 10000.0
    scaling: Scaling | None = None
    head_dim: int = 0
    interleaved: bool = False
    axes: tuple[int, ...] = ()
    backwards: bool = False

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.rotary_dim

    @property
    def order(self) -> tuple[int, ...] | None:
        """The model's channels in an order in which channel i of a head is rotated with channel i + width / 2; None if
        they are in such an order.

        Attention is the same for any order of channels that queries and keys share, so weights are loaded in this one.
        """
        half, pairs = self.width // 2, self.rotary_dim // 2
        if not pairs or (pairs == half and not self.interleaved and not self.backwards):
            return None
        first = [2 * i if self.interleaved else i for i in range(pairs)]
        second = [2 * i + 1 if self.interleaved else i + pairs for i in range(pairs)]
        if self.backwards:
            first, second = second, first
        rest = range(self.rotary_dim, self.width)
        return (*first, *rest[: half - pairs], *second, *rest[half - pairs :])

    def within(self, max_length: int) -> RopeSpec:
        """Return the same for sequences of at most `max_length` tokens: LongRoPE with its short divisors if they
        suffice."""
        scaling = self.scaling
        if not isinstance(scaling, LongRopeScaling) or max_length > scaling.original_max_position:
            return self
        return replace(self, scaling=replace(scaling, divisors=scaling.short))
