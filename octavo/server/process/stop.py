"""`Stop`: the signals that end a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ALWAYS = (signal.SIGINT, signal.SIGTERM)
"""Also if they are ignored, as a shell without job control has SIGINT ignored by what it starts in the background."""


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
        """Count one signal. SIGHUP is ignored after the first signal: a terminal that closes may send several."""
        if number == signal.SIGHUP and self.first.is_set():
            return
        self.number = number
        if self.first.is_set():
            self.second.set()
        self.first.set()
        if self.loading is not None:
            self.loading.cancel()

    @contextmanager
    def listening(self) -> Iterator[Stop]:
        """Handle SIGINT, SIGTERM and, unless it is ignored (nohup), SIGHUP for the time of the block."""
        loop = asyncio.get_running_loop()
        hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        handled = (*_ALWAYS, signal.SIGHUP) if hangs_up else _ALWAYS
        for number in handled:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield self
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
