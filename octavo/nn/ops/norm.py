"""Root-mean-square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, as a new tensor of x's dtype.

    Statistics and the product are float32 whatever the dtype, rounded once at the end.

    Args:
        x: [..., H].
        weight: [H], of x's dtype.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The step between two blocks of a pre-norm decoder: add to the residual stream, then normalise.

    Args:
        x: [T, H], a block's fresh output. **Overwritten** with the sum, which is the second result.
        residual: [T, H]; left as it is.
        weight: [H].

    Returns:
        (rms_norm(x + residual), x + residual).
    """
    total = x.add_(residual)
    return F.rms_norm(total, weight.shape, weight, eps), total
