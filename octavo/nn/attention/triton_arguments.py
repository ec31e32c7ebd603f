"""Common arguments of the Triton attention kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.fp8 import PLAIN, form_of

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Output:
    """The memory of attention's results.

    Attributes:
        values: [T, num_heads, head_dim], in the dtype of queries, or E4M3.
        inverse: `rounded_by` of `FusedBackend`, if values are E4M3.
    """

    values: Tensor
    inverse: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, inverse: Tensor | None) -> Output:
        """Return memory for the results of queries."""
        dtype = q.dtype if inverse is None else torch.float8_e4m3fn
        return cls(torch.empty(q.shape, dtype=dtype, device=q.device), inverse)

    def arguments(self) -> tuple[Tensor, Tensor]:
        """Return `out` and `inverse` of a kernel that is ROUNDED if there is one."""
        if self.inverse is None:
            return self.values, self.values
        return self.values.view(torch.uint8), self.inverse


def as_words(cache: Tensor) -> tuple[int, Tensor]:
    """Return FORM, and the cache as the attention kernels read it: FP8 in pairs."""
    form = form_of(cache.dtype)
    return form, cache if form == PLAIN else cache.view(torch.uint16)


def scales_of(spec: AttentionSpec) -> tuple[float, float]:
    """Return the factors of scores before and after the cap. Scores are arguments of exp2, so one includes log2(e)."""
    if spec.soft_cap is None:
        return spec.scale * _LOG2_E, 0.0
    return spec.scale, spec.soft_cap


def head_terms(spec: AttentionSpec, sinks: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads' sinks and the slopes of their linear biases, float32; `unused` in place of what a layer
    lacks."""
    slopes = unused if spec.slopes is None else _on_device(spec.slopes, unused.device)
    return unused if sinks is None else sinks, slopes


@functools.cache
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def two_strides(x: Tensor) -> Sequence[int]:
    """Return the strides of tokens and heads of x [T, heads, head_dim]."""
    if x.stride(2) != 1:
        raise AssertionError("the channels of a head must be contiguous")
    return x.stride()[:2]
