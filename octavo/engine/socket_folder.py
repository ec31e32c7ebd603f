"""`SocketFolder`: where the processes of one server meet."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "octavo-"
_OWNER = "owner"
_LONGEST = 72
"""Bytes of the path that holds such folders: a socket's name may have 107 (unix(7)), and theirs add up to 35."""


class SocketFolder:
    """A temporary folder of this process alone. One whose owner was killed is removed when the next one is made.

    The owner holds a lock on a file in it, which the kernel releases when the owner ends, however it does. The file
    gets its name once it is locked: who finds it unlocked knows that the owner is dead.

    Attributes:
        path: of the folder, short enough for the names of sockets.
    """

    def __init__(self) -> None:
        parent = _parent()
        _remove_orphans(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / f"{_OWNER}.new"
        self._lock = unlocked.open("x")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _OWNER)

    def remove(self) -> None:
        """With all that is in it. More than once does no harm."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _parent() -> Path:
    """Where temporary files go, unless that is too long a path."""
    usual = tempfile.gettempdir()
    return Path(usual if len(os.fsencode(usual)) <= _LONGEST else "/tmp")


def _remove_orphans(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, made by something else, or just removed
            _remove_if_orphaned(folder)


def _remove_if_orphaned(folder: Path) -> None:
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    with (folder / _OWNER).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
