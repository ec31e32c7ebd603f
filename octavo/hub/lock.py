"""One process at a time, for work whose result all can share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a Unix: without locks work may be done twice, and atomic renames keep it correct
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.1


@contextlib.contextmanager
def exclusive(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds an advisory lock on a file, which is created. `waiting` is called now and then while another holds it.

    The kernel releases the lock of a process that dies. The file stays: removing it would let two processes hold locks
    on two files of one name.
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
