"""Mutual exclusion between processes, for work that all can share the result of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: without locks, work may be done twice; atomic renames keep the result correct
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.1


@contextlib.contextmanager
def exclusive(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock on a file, which is created if missing. Call `waiting` periodically while another holds it.

    The kernel releases the lock of a process that dies. The file is kept: if it were removed, two processes could hold
    locks on different files with the same name.
    """
    with path.open("a") as file:
        if fcntl is not None:
            while not _try(file.fileno()):
                waiting()
                time.sleep(_POLL_S)
        yield


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
