"""A connection whose client reads slowly, and one whose client does not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.server.process.connection import connection_class

LIMIT_S = 60.0


class Clock:
    """An event loop's timers, which ring when the test says so."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, work: Callable[..., None], *args: Any) -> Timer:
        assert seconds == LIMIT_S
        self.timers.append(Timer(work, args))
        return self.timers[-1]

    def ring(self) -> None:
        timers, self.timers = self.timers, []
        for timer in timers:
            timer.ring()


class Timer:
    def __init__(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._work, self._args = work, args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def ring(self) -> None:
        if not self._cancelled:
            self._work(*self._args)


class Transport:
    def __init__(self) -> None:
        self.unsent = 0
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class Protocol:
    """What the class needs of uvicorn's protocols."""

    def __init__(self) -> None:
        self.loop, self.transport = Clock(), Transport()

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


def test_a_slow_reader_gets_a_large_answer_and_one_that_stops_is_dropped() -> None:
    closed: list[None] = []
    connection = connection_class(Protocol, LIMIT_S, lambda: closed.append(None))()  # type: ignore[arg-type]
    connection.transport.unsent = 12_000_000
    connection.pause_writing()
    for _ in range(5):
        connection.transport.unsent -= 1_000_000
        connection.loop.ring()
    assert not connection.transport.aborted
    connection.loop.ring()
    assert connection.transport.aborted
    assert len(closed) == 1


def test_a_connection_that_sends_again_is_watched_no_more() -> None:
    connection = connection_class(Protocol, LIMIT_S, lambda: None)()  # type: ignore[arg-type]
    connection.transport.unsent = 70_000
    connection.pause_writing()
    connection.resume_writing()
    connection.loop.ring()
    assert not connection.transport.aborted
