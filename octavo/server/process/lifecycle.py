"""The requests in flight, and whether new ones are accepted: the basis of readiness and graceful shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.server.board import Board, Count


class Lifecycle:
    """Accepts requests until `drain()`; `idle` is set while no inference request is in flight in this process.

    Args:
        board: counts the requests in flight.

    Attributes:
        active: engine ids of the requests being generated.
    """

    def __init__(self, board: Board | None = None) -> None:
        self.board = board or Board()
        self.draining = False
        self.active: set[str] = set()
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def inflight(self) -> int:
        """Inference requests that this process has not fully answered."""
        return self.board.own(Count.SERVED)

    @property
    def inflight_everywhere(self) -> int:
        """The same for all processes of the server."""
        return self.board.total(Count.SERVED)

    def drain(self) -> None:
        """Refuse new inference requests from now on; those in flight continue."""
        self.draining = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one inference request in flight for the time of the block."""
        self.board.add(Count.SERVED, 1)
        self.idle.clear()
        try:
            yield
        finally:
            self.board.add(Count.SERVED, -1)
            if not self.inflight:
                self.idle.set()
