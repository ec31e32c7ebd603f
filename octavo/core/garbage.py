"""Settings of Python's cyclic garbage collector for processes with thousands of streams or cached blocks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# By default a collection runs after 700 more container allocations than deallocations. With a thousand streams that is
# several times per step, and each full collection stops all streams while it visits every object: with 64,000 cached
# blocks, which are three objects each, for 20 ms.
_THRESHOLDS = (50_000, 20, 10)


def collect_seldom() -> None:
    """Collect rarely from now on, in a process of its own."""
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """For the time of the block, exempt existing objects from collection, and collect rarely.

    There is little to collect: requests are freed by reference counting, except for the remains of failures.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
