"""Sampling by the kernels' threads, each row by what the table of slots says of it."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from octavo.native.bindings import Sample
from octavo.native.program import Pool

SAMPLING = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")),
        ("seed", np.uint64),
        *((name, np.int64) for name in ("banned_ids", "bias_ids", "bias_values", "allowed", "bad_words")),
        *(
            (name, np.int32)
            for name in ("top_k", "num_prompt", "min_tokens", "num_banned", "num_bias", "bad_words_size")
        ),
        ("changes", np.int32),
    ],
    align=True,
)
"""`OctavoSampling`: how one slot is sampled. Ids, values, masks and words are addresses of what must stay there."""


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
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token for each row of logits.

    Args:
        logits: address of float32 [S, columns], of which a row begins every `stride` numbers. They are written to, and
            are in the end what they were.
        slots: [S], the slot of each row.
        sampling: [slots] of `SAMPLING`.
        tokens: [slots, n], each slot's tokens so far.
        length: [slots], how many those are.
        allowed: [S], the address of each row's mask: an int32 for every 32 tokens, with a bit set for each that is
            possible; 0 where all are. None is 0 for all rows.

    Returns:
        The tokens [S], and each row's largest logit [S] after penalties and bans. Where that is not finite no token is
        possible, and the token is 0.
    """
    count = len(slots)
    chosen, peaks = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
    batch = Sample(
        logits=logits,
        slots=slots.ctypes.data,
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
