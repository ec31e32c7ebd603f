"""Change a sampling rate, by a polyphase filter: a sinc within a Kaiser window
(https://ccrma.stanford.edu/~jos/resample/)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
"""[samples], one channel, from -1 to 1."""
_ZEROS = 64
"""Zero crossings of the sinc on each side."""
_ROLLOFF = 0.95
"""The cutoff, in parts of the lower of both Nyquist frequencies."""
_BETA = 10.0
"""Of the Kaiser window: attenuates aliases by about 100 dB."""
_AT_ONCE = 256
"""Filters in memory. Unusual rates have up to `target` of them."""


def resampled(samples: Samples, rate: int, target: int) -> Samples:
    """Return samples at another rate, ceil(n * target / rate) of them; silence is assumed before and after.

    Args:
        rate: samples per second, as given.
        target: samples per second, as wanted.
    """
    if rate == target or not len(samples):
        return samples
    shared = math.gcd(rate, target)
    up, down = target // shared, rate // shared
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = math.ceil(_ZEROS / cutoff)
    count = -(-len(samples) * up // down)
    before, after = half - 1, half + down
    padded = np.concatenate([np.zeros(before, np.float32), samples, np.zeros(after, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    made = np.empty(count, dtype=np.float32)
    for some in range(0, min(up, count), _AT_ONCE):
        phases = np.arange(some, min(some + _AT_ONCE, up, count))
        filters = _filters(phases * down % up / up, cutoff, half)
        for phase, taps in zip(phases.tolist(), filters, strict=True):
            places = made[phase::up]
            first = phase * down // up
            places[:] = windows[first : first + (len(places) - 1) * down + 1 : down] @ taps
    return made


def _filters(offsets: NDArray[np.float64], cutoff: float, half: int) -> NDArray[np.float32]:
    """Return a filter for each offset between two given samples, [offsets, 2 * half]."""
    times = offsets[:, None] + (half - 1 - np.arange(2 * half))
    inside = np.clip(1 - (times / half) ** 2, 0, None)
    made = np.sinc(cutoff * times) * np.i0(_BETA * np.sqrt(inside))
    return np.asarray(made / made.sum(axis=1, keepdims=True), dtype=np.float32)
