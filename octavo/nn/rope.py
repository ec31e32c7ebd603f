"""The table of rotary cosines and sines, computed once and shared by all layers of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops.rope import apply_rope, apply_rope_joint
from octavo.nn.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, plain, tensor_bytes

FACTORS = "rope_freqs.weight"


class Rope(WeightLayer):
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-rotation form.

    Attributes:
        cos_sin: [max_position, width] float32, cosines in the first half of each row, sines in the second. Channels
            that are not rotated have cosine 1 and sine 0.
        still: a table of the same shape and angle 0, for kernels that get rotated heads; empty if there are none.
    """

    if TYPE_CHECKING:

        def __call__(
            self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor | None = None, /
        ) -> tuple[Tensor, Tensor]: ...

    def __init__(self, device: torch.device, spec: RopeSpec, *, still: bool = False) -> None:
        """
        Args:
            still: make that table, too.
        """
        super().__init__("rope", device)
        self.spec = spec
        self.cos_sin = self.still = torch.empty(0)
        self._has_still = still
        rest = spec.width // 2 - len(spec.axes) if spec.axes else 0
        self._axes = torch.tensor([*spec.axes, *[0] * rest], dtype=torch.int64).to(device)
        """The axis of each pair of channels; any for those that are not rotated."""

    def forward(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rotate q [T, heads, head_dim] and k [T, kv_heads, head_dim] in place. `table`: in place of `cos_sin`."""
        return apply_rope(q, k, self.cos_sin if table is None else table, positions)

    def joint(self, qk: Tensor, positions: Tensor, table: Tensor | None = None) -> Tensor:
        """Rotate concatenated queries and keys, [T, heads + kv_heads, head_dim], in place; likewise."""
        return apply_rope_joint(qk, self.cos_sin if table is None else table, positions)

    def along_axes(self, positions: Tensor, shifts: Tensor) -> Tensor:
        """Return a table with a row for each token, whose positions along the axes differ: [T, width] float32.

        Args:
            positions: [T] int64.
            shifts: [T, axes] int32, added to them.
        """
        half = self.cos_sin.shape[1] // 2
        # Padding of a recorded step has any position.
        rows = (positions[:, None] + shifts).clamp_(0, len(self.cos_sin) - 1).index_select(1, self._axes)
        columns = torch.arange(half, device=self.device)
        return torch.cat([self.cos_sin[rows, columns], self.cos_sin[rows, columns + half]], dim=1)

    def wanted(self) -> list[Wanted]:
        """Return the optional tensor of GGUF files with a divisor per frequency instead of a named scaling."""
        if not self.spec.rotary_dim:
            return []
        spec = TensorSpec((self.spec.rotary_dim // 2,), torch.float32)
        return [Wanted(FACTORS, spec, optional=True)]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        divisors = tensors[0] if tensors else None
        self.cos_sin = cos_sin_table(self.spec, None if divisors is None else plain(divisors).cpu()).to(self.device)
        if self._has_still:
            self.still = torch.zeros_like(self.cos_sin)
            self.still[:, : self.still.shape[1] // 2] = 1.0

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.cos_sin, self.still)


def cos_sin_table(spec: RopeSpec, divisors: Tensor | None = None) -> Tensor:
    """Return [max_position, width] float32. `divisors` [rotary_dim / 2] replace a Llama 3 scaling."""
    if not spec.rotary_dim:
        frequencies = torch.zeros(0)
    elif divisors is None:
        frequencies = inverse_frequencies(spec)
    else:
        scaling = None if isinstance(spec.scaling, Llama3Scaling) else spec.scaling
        frequencies = inverse_frequencies(RopeSpec(spec.rotary_dim, spec.max_position, spec.theta, scaling)) / divisors
    angles = torch.outer(torch.arange(spec.max_position, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if isinstance(spec.scaling, YarnScaling | LongRopeScaling):
        cos, sin = cos * spec.scaling.attention_factor, sin * spec.scaling.attention_factor
    rest = (0, spec.width // 2 - len(frequencies))
    return torch.cat([F.pad(cos, rest, value=1.0), F.pad(sin, rest)], dim=1)


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Return [rotary_dim / 2] float32, radians per position, with Transformers' order of operations."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / spec.rotary_dim
    periods = spec.theta**exponents
    match spec.scaling:
        case None:
            return 1.0 / periods
        case LinearScaling(factor):
            return (1.0 / periods) / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / periods, scaling)
        case YarnScaling() as scaling:
            return _yarn(periods, scaling, spec)
        case ProportionalScaling(pairs, factor):
            rotates = torch.arange(spec.rotary_dim // 2) < pairs
            return torch.where(rotates, 1.0 / periods / factor, 0.0)
        case LongRopeScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.divisors) * periods)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow wavelengths above original / low, keep those below original / high, and blend linearly between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(periods: Tensor, scaling: YarnScaling, spec: RopeSpec) -> Tensor:
    """Keep channels that rotate often within the original context, slow the others (section 3.2)."""

    def channel(turns: float) -> float:
        """Return the (fractional) channel pair that makes `turns` rotations over the original context."""
        waves = scaling.original_max_position / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(waves) / (2 * math.log(spec.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001
    slowed = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return 1.0 / (scaling.factor * periods) * slowed + 1.0 / periods * (1 - slowed)
