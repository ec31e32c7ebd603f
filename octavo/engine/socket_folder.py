"""`SocketFolder`: the folder of the sockets between the processes of one server."""

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
"""Most bytes of the parent folder's path: a socket's path may have 107 (unix(7)), and folder and file take 35."""


class SocketFolder:
    """A temporary folder owned by this process. Creating one removes those whose owner was killed.

    The owner holds a lock on a file in it, which the kernel releases when the owner ends in any way. The file gets its
    name after it is locked, so an unlocked file means that the owner has ended.

    Attributes:
        path: of the folder, short enough for the paths of sockets.
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
        """Remove the folder and its contents. May be called more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _parent() -> Path:
    """Return the system's folder for temporary files, or /tmp if that path is too long."""
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
