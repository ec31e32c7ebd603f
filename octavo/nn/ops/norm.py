"""Root-mean-square normalization (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, as a new tensor.

    Statistics and the product are always float32, rounded once at the end.

    Args:
        x: [..., H], of the weight's dtype or float32; or of any, if the weight is float32.
        weight: [H].
        dtype: of the result; None for the weight's.
    """
    dtype = dtype or weight.dtype
    if x.is_cuda and x.is_contiguous():
        from octavo.nn.ops import triton_norm  # needs triton, which machines without a GPU may lack

        return triton_norm.rms_norm(x, weight, eps, dtype)
    if x.dtype != weight.dtype and weight.dtype == torch.float32:
        x = x.float()
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream of a pre-norm decoder, then normalize.

    Args:
        x: [T, H], a block's output. **Overwritten** with the sum, if of the residual's dtype.
        residual: [T, H], of x's dtype or float32; unchanged.
        weight: [H].
        dtype: of the normalized result; None for the weight's.

    Returns:
        (rms_norm(x + residual), x + residual), the sum in the residual's dtype.
    """
    if x.is_cuda and x.is_contiguous() and residual.is_contiguous():
        from octavo.nn.ops import triton_norm

        return triton_norm.add_rms_norm(x, residual, weight, eps, dtype)
    total = x.add_(residual) if x.dtype == residual.dtype else residual + x
    return rms_norm(total, weight, eps, dtype), total


def sum_rms_norm(parts: Tensor, stream: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Add the parts of a product to the residual stream, then normalize. On a GPU.

    Args:
        parts: [P, T, H] contiguous.
        stream: [T, H] contiguous, to which the parts are added **in place**, rounded once.
        weight: [H].
        dtype: of the result; None for the weight's.

    Returns:
        rms_norm(stream).
    """
    from octavo.nn.ops import triton_norm

    return triton_norm.sum_rms_norm(parts, stream, weight, eps, dtype)
