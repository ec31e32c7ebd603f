"""Folders for Octavo's downloads, derived files and user data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $OCTAVO_CACHE, else octavo/ in $XDG_CACHE_HOME or ~/.cache. The folder may not exist."""
    own = os.environ.get("OCTAVO_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "octavo"


def data_dir() -> Path:
    """Return $OCTAVO_DATA, else octavo/ in $XDG_DATA_HOME or ~/.local/share. The folder may not exist."""
    own = os.environ.get("OCTAVO_DATA")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_DATA_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".local" / "share") / "octavo"


def kernel_dir() -> Path:
    """Return $OCTAVO_KERNEL_CACHE, else the cache folder: holds compiled kernels and tuning results."""
    own = os.environ.get("OCTAVO_KERNEL_CACHE")
    return Path(own).expanduser() if own else cache_dir()
