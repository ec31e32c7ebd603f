"""Resize with Pillow's filters in several threads. Pillow releases Python's lock meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from octavo.device.host import physical_cores

LEAST_PIXELS = 1 << 19
"""Of the images before and after, from which on threads gain more than they cost."""
_MOST_THREADS = 16

Pixels = NDArray[np.uint8]


@cache
def processors() -> int:
    """Return how many threads may compute: the cores that this process may use."""
    return min(_MOST_THREADS, physical_cores())


@cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads of all resizing in this process. They never wait for each other."""
    return ThreadPoolExecutor(processors(), thread_name_prefix="octavo-resize")


def resize(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Return [height, width, 3], the same as of Pillow's `resize` to the bit: its channels do not depend on each
    other."""
    if processors() == 1 or max(pixels.shape[0] * pixels.shape[1], height * width) < LEAST_PIXELS:
        return _resized(pixels, height, width, resample)
    found = np.empty((height, width, 3), dtype=np.uint8)

    def fill(channel: int) -> None:
        found[..., channel] = _resized(np.ascontiguousarray(pixels[..., channel]), height, width, resample)

    list(_pool().map(fill, range(3)))
    return found


def _resized(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))
