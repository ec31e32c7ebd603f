"""Where Octavo keeps what it downloads and derives, and what is entrusted to it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$OCTAVO_CACHE; else octavo/ in the user's cache folder ($XDG_CACHE_HOME or ~/.cache). It may not exist yet."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "octavo"


def data_dir() -> Path:
    """$OCTAVO_DATA; else octavo/ in the user's data folder ($XDG_DATA_HOME or ~/.local/share). It may not exist yet."""
    own = os.environ.get("OCTAVO_DATA")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".local" / "share") / "octavo"


def kernel_dir() -> Path:
    """$OCTAVO_KERNEL_CACHE; else the cache folder: what is compiled or tried out on this machine, and can be again."""
    own = os.environ.get("OCTAVO_KERNEL_CACHE")
    return Path(own).expanduser() if own else cache_dir()
