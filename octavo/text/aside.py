"""Work on long texts in threads, so that other streams continue."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LONG = 8192
_VERY_LONG = 1 << 18


async def aside(length: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on a text of `length` characters, in a thread if the text is long.

    `Tokenizer` releases the GIL meanwhile. A tokenizer allocates some hundred bytes per character; after a very long
    text this memory is returned to the system, because the C library would keep it in every thread.
    """

    if length <= _LONG:
        return work()

    def done() -> T:
        try:
            return work()
        finally:
            if length > _VERY_LONG:
                _give_back()

    return await asyncio.to_thread(done)


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
