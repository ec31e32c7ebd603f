"""`Inbox`: a request's news on their way from the engine to the one who reads them."""

from __future__ import annotations

import asyncio
from collections import deque

from octavo.core.output import TokenDelta


class Inbox:
    """Deltas in order, then perhaps an error. One reader, which waits only when nothing is there.

    Attributes:
        tokens: those that wait to be read.
        suspect: too many did, a moment ago.
        total: tokens that have come.
        at: when the last did; whoever puts them there sets it.
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
        """Raise `error` once the deltas before it are read; what comes later is dropped."""
        if self._error is None:
            self._error = error
            self._wake()

    def overflows(self, limit: int) -> bool:
        """Whether more than `limit` tokens wait, not all in one piece."""
        return self.tokens > limit and len(self._deltas) > 1 and self._error is None

    async def get(self) -> TokenDelta:
        """The next delta, or the error after the last."""
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
