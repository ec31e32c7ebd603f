"""Merging of several streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 16


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield (source number, item) from all `sources` as items arrive.

    The first source that fails ends all of them with its exception; closing this generator closes every source.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_AHEAD * len(sources))
    tasks = [asyncio.create_task(_feed(number, source, queue)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            news = await queue.get()
            if news is None:
                running -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _feed(
    number: int, source: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(source) as items:
            async for item in items:
                await queue.put((number, item))
    except Exception as exc:
        await queue.put(exc)
    else:
        await queue.put(None)
