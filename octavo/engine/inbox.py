"""`Inbox`: the queue of a request's deltas between the engine client and the reader."""

from __future__ import annotations

import asyncio
from collections import deque

from octavo.core.output import TokenDelta


class Inbox:
    """Deltas in order, optionally followed by an error. One reader, which waits only while the queue is empty.

    Attributes:
        tokens: unread tokens.
        suspect: the limit of unread tokens was exceeded and will be checked again.
        total: tokens received so far.
        at: `time.monotonic()` of the last delta, set by the writer; None before the first.
    """

    __slots__ = ("_deltas", "_error", "_waiter", "at", "suspect", "tokens", "total")

    def __init__(self) -> None:
        self.tokens = 0
        self.total = 0
        self.at: float | None = None
        self._deltas: deque[TokenDelta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.suspect = False

    def put(self, delta: TokenDelta) -> None:
        if self._error is None:
            self._deltas.append(delta)
            self.tokens += len(delta.tokens)
            self.total += len(delta.tokens)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Raise `error` in `get` after the deltas before it; drop later deltas."""
        if self._error is None:
            self._error = error
            self._wake()

    def overflows(self, limit: int) -> bool:
        """Return whether more than `limit` tokens, in more than one delta, are unread."""
        return self.tokens > limit and len(self._deltas) > 1 and self._error is None

    async def get(self) -> TokenDelta:
        """Wait for the next delta and return it; raise the error after the last one."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta = self._deltas.popleft()
        self.tokens -= len(delta.tokens)
        return delta

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
