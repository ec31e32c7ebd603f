"""`EventLog`: the events of a response in the background, for clients that come, leave and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from octavo.server.errors import ApiError
from octavo.server.openai.respond.output import ResponseEvent
from octavo.server.stream import named_event


class Numbered:
    """Writes the events of one response, each with its number."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, event: ResponseEvent) -> bytes:
        number, self._next = self._next, self._next + 1
        return named_event(event["type"], event | {"sequence_number": number})

    def error(self, error: ApiError) -> bytes:
        """Return the event for an error after the stream has begun."""
        return self(event_of_error(error))


class EventLog:
    """Events in the order of their numbers, from 0 on. Any number of readers follow it."""

    def __init__(self) -> None:
        self._told = Numbered()
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._ended = False

    def add(self, *events: ResponseEvent) -> None:
        self._events += map(self._told, events)
        self._wake()

    def end(self) -> None:
        """Let readers end after the last event."""
        self._ended = True
        self._wake()

    async def after(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the events with larger numbers, as they are added."""
        place = number + 1
        while True:
            changed = self._changed
            if place < len(self._events):
                found, place = self._events[place:], len(self._events)
                yield b"".join(found)
            elif self._ended:
                return
            else:
                await changed.wait()

    @property
    def size(self) -> int:
        """Bytes of all events."""
        return sum(map(len, self._events))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def event_of_error(error: ApiError) -> ResponseEvent:
    """Return the event that follows `response.failed`."""
    return {"type": "error", "code": str(error.status), "message": error.message, "param": error.param}
