"""Python's cyclic garbage collector, set for a process that holds thousands of streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# By default a collection runs whenever 700 more containers are alive than at the last one: with a thousand streams that
# is several times a step, and each full one stops all streams for as long as it takes to visit all there is.
_THRESHOLDS = (50_000, 20, 10)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """For the time of the block what exists already is never visited, and what comes later seldom.

    Little is left to the collector: requests are freed by their reference counts, but for what failures leave behind.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
