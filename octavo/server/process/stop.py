"""`Stop`: the signals that end a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The two signals that stop a server: the first requests a graceful shutdown, the second an immediate end."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.loading: asyncio.Task[int] | None = None
        """Cancelled by the first signal."""
        self.number = signal.SIGTERM
        """The number of the last signal."""

    def request(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Count one signal."""
        self.number = number
        if self.first.is_set():
            self.second.set()
        self.first.set()
        if self.loading is not None:
            self.loading.cancel()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handle SIGINT and SIGTERM for the time of the block."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield self
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
