"""Rotary embedding of a model's configuration. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


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
class RopeSpec:
    """`rotary_dim` channels of each head are rotated; positions are below `max_position`."""

    rotary_dim: int
    max_position: int
    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
