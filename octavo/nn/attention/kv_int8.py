"""Keys and values as 8-bit integers with a scale per token and head: the reference form, in torch.

A scale is a vector's largest magnitude over 127, so the error is at most half of it. No calibration is needed, and a
token's stored values depend only on the token itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_LARGEST = 127


def pack(x: Tensor) -> Tensor:
    """Convert [..., head_dim] to int8 [..., head_dim + SCALE_BYTES]: integers, then the bytes of their float32
    scale."""
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, torch.full_like(peak, _LARGEST) / peak, 0.0)
    integers = (x * inverse).round_().to(torch.int8)
    return torch.cat([integers, (peak / _LARGEST).view(torch.int8)], dim=-1)


def unpack(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Reverse `pack`, to numbers of `dtype`."""
    integers, scale = cells.split([cells.shape[-1] - SCALE_BYTES, SCALE_BYTES], dim=-1)
    values: Tensor = integers * scale.contiguous().view(torch.float32)
    return values.to(dtype)
