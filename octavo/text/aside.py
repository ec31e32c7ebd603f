"""Work on long texts, beside the event loop, so that other streams flow on."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LONG = 8192
_VERY_LONG = 1 << 18


async def aside(length: int, work: Callable[[], T]) -> T:
    """The result of work on so many characters, done in a thread if they are many; `Tokenizer` leaves others the GIL.

    A tokenizer takes some hundred bytes for each character. What was needed for a very long text goes back to the
    system: the C library would keep it, in each thread anew.
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
