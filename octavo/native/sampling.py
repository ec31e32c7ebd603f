"""Sampling with native kernels, each row by its slot's parameters."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from octavo.native.bindings import SampleArgs
from octavo.native.program import Pool


def sample(
    pool: Pool,
    logits: int,
    stride: int,
    columns: int,
    slots: NDArray[np.int64],
    sampling: NDArray[np.void],
    tokens: NDArray[np.int32],
    length: NDArray[np.int64],
    allowed: NDArray[np.int64] | None = None,
    ahead: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample a token for each row of logits.

    Args:
        logits: address of float32 [S, columns], rows `stride` elements apart. They are modified and restored.
        slots: [S], the slot of each row.
        sampling: [slots] of `OctavoSampling`.
        tokens: [slots, n], each slot's tokens so far.
        length: [slots], the number of these.
        allowed: [S], the address of each row's mask, with a bit set for each allowed token; 0 if all tokens are
            allowed. None means 0 for all rows.
        ahead: [S], how many of the slot's drafts, which are after its tokens, count as tokens so far; None for none.

    Returns:
        The tokens [S], and each row's largest logit [S] after penalties and bans. If that is not finite, no token is
        allowed, and the token is 0.
    """
    count = len(slots)
    chosen, peaks = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    ahead = np.zeros(count, dtype=np.int64) if ahead is None else ahead
    batch = SampleArgs(
        logits=logits,
        slots=slots.ctypes.data,
        ahead=ahead.ctypes.data,
        allowed=None if allowed is None else allowed.ctypes.data,
        sampling=sampling.ctypes.data,
        tokens=tokens.ctypes.data,
        length=length.ctypes.data,
        chosen=chosen.ctypes.data,
        peaks=peaks.ctypes.data,
        logit_stride=stride,
        token_stride=tokens.shape[1],
        count=count,
        columns=columns,
    )
    pool.kernels.octavo_sample(pool.handle, ctypes.byref(batch))
    return chosen, peaks
