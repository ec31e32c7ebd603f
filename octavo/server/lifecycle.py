"""Whether the server takes requests, and which it still has: what readiness and a graceful shutdown rest on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Lifecycle:
    """Accepting until `drain()`; `idle` is set whenever no inference request is in flight.

    Attributes:
        active: engine ids of the requests that are being generated.
    """

    def __init__(self) -> None:
        self.draining = False
        self.active: set[str] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self._inflight = 0

    @property
    def inflight(self) -> int:
        """HTTP requests for inference that have not been fully answered."""
        return self._inflight

    def drain(self) -> None:
        """Refuse new inference requests from now on; those in flight go on."""
        self.draining = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count one inference request in flight for the time of the block."""
        self._inflight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._inflight -= 1
            if self._inflight == 0:
                self.idle.set()
