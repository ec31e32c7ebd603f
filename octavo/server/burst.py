"""Stream writing: in bursts of all available data, with periodic keep-alive bytes while there is none."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Message, Send

from octavo.server.task import end

T = TypeVar("T")


class Burst:
    """Writes all available data at once: a write costs far more than an event.

    Args:
        head: the message that starts the response; sent before the first write.
    """

    __slots__ = ("_head", "_pieces", "_send", "size")

    def __init__(self, send: Send, head: Message) -> None:
        self.size = 0
        self._send = send
        self._head: Message | None = head
        self._pieces: list[bytes] = []

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return bool(self._pieces) or self._head is None

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self.size += len(data)

    async def flush(self, *, last: bool = False) -> None:
        if self._pieces or last:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces, self.size = [], 0
            if self._head is not None:
                await self._begin(self._head)
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _begin(self, head: Message) -> None:
        self._head = None
        await self._send(head)


class BeatingBurst(Burst):
    """Also writes `beat` after `silence_s` seconds without data.

    Writes are serialized, so a slow reader gets at most one beat between two bursts. A burst sets no timer: when a beat
    is due, the time of the last write is checked.
    """

    __slots__ = ("_beat", "_last", "_lock", "_now", "_silence_s")

    def __init__(self, send: Send, head: Message, silence_s: float, beat: bytes) -> None:
        super().__init__(send, head)
        self._silence_s = silence_s
        self._beat = beat
        self._lock = asyncio.Lock()
        self._now = asyncio.get_running_loop().time
        self._last = self._now()

    async def flush(self, *, last: bool = False) -> None:
        if self._pieces or last:
            async with self._lock:
                await super().flush(last=last)
                self._last = self._now()

    async def beat(self) -> None:
        """Send beats until cancelled."""
        while True:
            await asyncio.sleep(self._last + self._silence_s - self._now())
            async with self._lock:
                if self._now() - self._last >= self._silence_s:
                    if self._head is not None:
                        await self._begin(self._head)
                    await self._send({"type": "http.response.body", "body": self._beat, "more_body": True})
                    self._last = self._now()


@asynccontextmanager
async def burst(send: Send, head: Message, silence_s: float, beat: bytes) -> AsyncIterator[Burst]:
    """Yield a writer for the time of the block; it sends beats if `silence_s` is over 0."""
    if not silence_s:
        yield Burst(send, head)
        return
    out = BeatingBurst(send, head, silence_s, beat)
    beating = asyncio.create_task(out.beat())
    try:
        yield out
    finally:
        await end(beating)


@types.coroutine
def next_or_flush(
    source: AsyncGenerator[T, None], flush: Callable[[], Coroutine[Any, Any, None]]
) -> Generator[Any, Any, T]:
    """Return `anext(source)`; await `flush` first, but only if the source is not ready.

    Raises:
        StopAsyncIteration: the source is exhausted.
    """
    step = source.__anext__().__await__()
    try:
        awaited = step.send(None)
        try:
            yield from flush().__await__()
        except BaseException as exc:
            awaited = step.throw(exc)
        while True:
            try:
                sent = yield awaited
            except BaseException as exc:
                awaited = step.throw(exc)
            else:
                awaited = step.send(sent)
    except StopIteration as ready:
        item: T = ready.value
        return item
