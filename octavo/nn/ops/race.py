"""Measure which of several launches is the fastest on a GPU, excluding host time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Multiply = Callable[[Tensor], Tensor]
"""Multiplies by the matrix that it gets."""
Pays = Callable[[Multiply, Multiply, Sequence[Tensor], int], bool]
"""Returns whether the first product is faster than the second with the same result, for like matrices and some rows."""

_MICROSECONDS = 200
"""Target duration of a round of calls."""
_MAX_CALLS = 4
_HEAD_START = 60_000
"""Initial delay in cycles per call: about 30 µs, in which the host launches a product and a norm."""
_LONGEST_START = 16 * _HEAD_START
_HOPELESS = 1.15
"""A candidate that takes this multiple of the best time is eliminated."""


class Track:
    """Compares launches on the device. Nothing else may run in this process meanwhile."""

    def __init__(self) -> None:
        self._head_start = _HEAD_START

    def race(
        self, runs: Sequence[Callable[[Tensor], object]], weights: Sequence[Tensor], rows: int, rounds: int
    ) -> list[float]:
        """Return the best round's milliseconds of each candidate's calls, each call with the next matrix."""
        best = [math.inf] * len(runs)
        calls = _calls(rows, weights[0])
        while runs and rounds:
            running = [i for i, time in enumerate(best) if time <= _HOPELESS * min(best)]
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in running]
            torch.cuda._sleep(self._head_start * calls * len(running))
            for i, (begin, end) in zip(running, events, strict=True):
                begin.record()
                for call in range(calls):
                    runs[i](weights[call % len(weights)])
                end.record()
            overtaken = events[0][0].query()  # the device waited for launches, so host time was measured
            events[-1][1].synchronize()
            if overtaken and self._head_start < _LONGEST_START:
                self._head_start *= 2
                continue
            for i, (begin, end) in zip(running, events, strict=True):
                best[i] = min(best[i], begin.elapsed_time(end))
            rounds -= 1
        return best


def _calls(rows: int, weight: Tensor) -> int:
    """Return the number of products in a round, from the time of one on a GPU of 600 TFLOP/s and 4 TB/s."""
    microseconds = max(2 * rows * weight.numel() / 600e6, weight.nbytes / 4e6)
    return max(1, min(_MAX_CALLS, int(_MICROSECONDS / microseconds)))
