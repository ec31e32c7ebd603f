"""Settings of Python's cyclic garbage collector for processes with thousands of streams or cached blocks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

# By default a collection runs after 700 more container allocations than deallocations. With a thousand streams that is
# several times per step, and each full collection stops all streams while it visits every object: with 64,000 cached
# blocks, which are three objects each, for 20 ms.
_THRESHOLDS = (50_000, 20, 10)
_QUIET_S, _BUSY_S = 60.0, 600.0


class Garbage:
    """Collects garbage at times of the process's own choice.

    In an engine, the objects that outlive twenty collections of young ones are up to a million, mostly of cached
    blocks, and visiting them stopped all streams for 0.15 s. Requests are freed by reference counting, so there is
    little to find: the remains of failures.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def take_over(self) -> None:
        """Exempt what exists from collection, and stop Python's own collections."""
        gc.collect()
        gc.freeze()
        gc.disable()
        self._last = time.monotonic()

    def collect(self, *, quiet: bool) -> None:
        """Collect if the last time is ten minutes ago; one minute if it is `quiet`, so that nothing waits for it."""
        if time.monotonic() - self._last > (_QUIET_S if quiet else _BUSY_S):
            gc.collect()
            self._last = time.monotonic()


def collect_seldom() -> None:
    """Collect rarely from now on, in a process of its own."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """For the time of the block, exempt existing objects from collection, and collect rarely."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
