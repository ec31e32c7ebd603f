"""Triton's launchers, loaded by several threads."""

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

from triton.runtime import build


@functools.cache
def separate_launchers() -> None:
    """Give each caller of Triton's loader of C modules a module of its own.

    All launchers are modules of one name (until Triton 3.6), and Python updates the module that it loaded last when it
    loads one of them again. So a thread may read another kernel's launch function, with other arguments.
    """
    load, lock = build._load_module_from_path, threading.Lock()

    @functools.wraps(load)
    def load_separately(name: str, *args: Any) -> ModuleType:
        own = ModuleType(name)
        with lock:
            vars(own).update(vars(load(name, *args)))
        return own

    build._load_module_from_path = load_separately
