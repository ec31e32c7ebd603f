"""Lines for the terminal or the log that a command's output goes to."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO


def say(text: str) -> None:
    """Write a line that is not the command's output to standard error; see `write_line`."""
    write_line(f"octavo: {text}", sys.stderr)


def write_line(text: str, stream: TextIO) -> None:
    """Write a line at once. If that fails (a full disk, a reader that is gone), drop it, since a server must go on."""
    try:
        print(text, file=stream, flush=True)
    except OSError:
        drop_unwritten(stream)


def open_closed() -> None:
    """Open /dev/null in place of standard streams that are closed. Otherwise a socket or file would get their numbers,
    and what libraries print. Call before other files are opened."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (open until the end)
            os.set_inheritable(stream.fileno(), True)  # child processes need them, too
            setattr(sys, name, stream)


def drop_unwritten(stream: TextIO) -> None:
    """Drop what `stream` failed to write; it would fail again with the next line, or when the process ends."""
    with contextlib.suppress(OSError, ValueError):  # not every stream has a descriptor
        number = stream.fileno()
        own, null = os.dup(number), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            stream.flush()
        finally:
            os.dup2(own, number)
            os.close(own)
            os.close(null)
