"""Logarithmic mel spectrograms, as Whisper reads them (https://arxiv.org/abs/2212.04356, section 2.2)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from octavo.features.media.audio.resample import Samples

RATE = 16_000
"""Samples per second."""
HOP = 160
"""Samples between two frames."""
WINDOW = 400
"""Samples of a frame."""
_AT_ONCE = 4096
"""Frames that are transformed at once, which bounds memory."""
_FLOOR, _RANGE = 1e-10, 8.0
_LINEAR_HZ, _MELS_PER_HZ, _LOG_STEP = 1000.0, 3 / 200, np.log(6.4) / 27

Spectrogram = NDArray[np.float32]
"""[bins, frames]."""


def log_mel(samples: Samples, bins: int, frames: int) -> Spectrogram:
    """Return the first frames of a spectrogram, [bins, frames] float32.

    Frame i is centered at sample i * `HOP`; the samples are mirrored at both ends. Values are within a range of 2.

    Args:
        samples: at `RATE`, at least WINDOW // 2 + 1 of them.
        frames: up to len(samples) // HOP + 1.
    """
    padded = np.pad(samples, WINDOW // 2, mode="reflect")
    parts = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: (frames - 1) * HOP + 1 : HOP]
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)).astype(np.float32)
    filters = _filters(bins)
    made = np.empty((bins, frames), dtype=np.float32)
    for first in range(0, frames, _AT_ONCE):
        spectrum = np.fft.rfft(parts[first : first + _AT_ONCE] * window)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        made[:, first : first + _AT_ONCE] = filters @ power.T
    made = np.log10(np.maximum(made, np.float32(_FLOOR)))
    return np.asarray((np.maximum(made, made.max() - np.float32(_RANGE)) + 4) / 4, dtype=np.float32)


@lru_cache(maxsize=4)
def _filters(bins: int) -> NDArray[np.float32]:
    """Return triangles of equal area on Slaney's mel scale, [bins, WINDOW // 2 + 1]."""
    edges = _hertz(np.linspace(0.0, _mels(RATE / 2), bins + 2))
    frequencies = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    made = np.clip(np.minimum(rising, falling), 0, None) * (2.0 / (high - low))
    return np.asarray(made, dtype=np.float32)


def _mels(hertz: float) -> float:
    """Return a frequency on Slaney's scale: linear up to 1,000 Hz, logarithmic above."""
    if hertz < _LINEAR_HZ:
        return hertz * _MELS_PER_HZ
    return float(_LINEAR_HZ * _MELS_PER_HZ + np.log(hertz / _LINEAR_HZ) / _LOG_STEP)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = mels - _LINEAR_HZ * _MELS_PER_HZ
    return np.where(above < 0, mels / _MELS_PER_HZ, _LINEAR_HZ * np.exp(above * _LOG_STEP))
