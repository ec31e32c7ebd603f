"""Which of some launches is the fastest on a GPU, measured without the host that launches them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_MICROSECONDS = 200
"""What the calls of a round take together, of products that take so long."""
_MAX_CALLS = 4
_HEAD_START = 60_000
"""Cycles for each call, to begin with: about 30 µs, in which the host launches a product and a norm."""
_LONGEST_START = 16 * _HEAD_START
_HOPELESS = 1.15
"""Who takes so many times the best's time is out of the race."""


class Track:
    """Where launches race on the device. Nothing else may run in this process meanwhile."""

    def __init__(self) -> None:
        self._head_start = _HEAD_START

    def race(
        self, runs: Sequence[Callable[[Tensor], object]], weights: Sequence[Tensor], rows: int, rounds: int
    ) -> list[float]:
        """Milliseconds that some calls of each take, every one with the next of the matrices: the best round's."""
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
            overtaken = events[0][0].query()  # the device has waited for launches, so the host was measured
            events[-1][1].synchronize()
            if overtaken and self._head_start < _LONGEST_START:
                self._head_start *= 2
                continue
            for i, (begin, end) in zip(running, events, strict=True):
                best[i] = min(best[i], begin.elapsed_time(end))
            rounds -= 1
        return best


def _calls(rows: int, weight: Tensor) -> int:
    """How many products make a round, by what a chip of 600 TFLOP/s and 4 TB/s would need for one."""
    microseconds = max(2 * rows * weight.numel() / 600e6, weight.nbytes / 4e6)
    return max(1, min(_MAX_CALLS, int(_MICROSECONDS / microseconds)))
