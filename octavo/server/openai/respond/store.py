"""`ResponseStore`: responses that clients may retrieve. In memory, bounded, lost when the server ends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.server.errors import ApiError
from octavo.server.openai.respond.events import EventLog
from octavo.server.openai.respond.output import ResponseEvent

MAX_KEPT = 4096
MAX_KEPT_BYTES = 64 << 20
QUEUED, CANCELLED = "queued", "cancelled"


@dataclass(slots=True)
class Stored:
    """A response and its input.

    Attributes:
        log: its events, if it is streamed in the background.
        task: runs it in the background.
        size: bytes, as they were when it was stored.
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    log: EventLog | None = None
    task: asyncio.Task[None] | None = None
    size: int = 0

    def tell(self, *events: ResponseEvent) -> None:
        if self.log is not None:
            self.log.add(*events)

    def end(self, *failure: ResponseEvent) -> None:
        """Tell that the response has ended, as its status says. A cancelled one counts as incomplete: the API has no
        event for it."""
        status = self.response["status"]
        kind = "incomplete" if status == CANCELLED else status
        self.tell({"type": f"response.{kind}", "response": self.response}, *failure)
        if self.log is not None:
            self.log.end()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the background."""
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self.response["status"] == QUEUED:  # cancelled before it began
            self.response["status"] = CANCELLED
            self.end()


class ResponseStore:
    """Keeps the newest responses; evicts the oldest beyond a number or a total size."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._items: dict[str, dict[str, Any]] = {}
        self._size = 0

    def put(self, stored: Stored) -> None:
        """Store a response, or its new state."""
        name = stored.response["id"]
        self._drop(name)
        stored.size = len(msgspec.json.encode([stored.response, stored.input]))
        stored.size += 0 if stored.log is None else stored.log.size
        self._kept[name] = stored
        self._items |= {item["id"]: item for item in stored.response["output"]}
        self._size += stored.size
        while len(self._kept) > MAX_KEPT or (self._size > MAX_KEPT_BYTES and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def get(self, name: str, param: str = "response_id") -> Stored:
        """Return a response.

        Raises:
            ApiError: 404, it was never stored or is no longer.
        """
        stored = self._kept.get(name)
        if stored is None:
            raise ApiError(
                404, f"Response with id '{name}' not found. It was never stored, or is no longer kept.", param=param
            )
        return stored

    def item(self, name: str) -> dict[str, Any] | None:
        """Return an output item of a stored response, by its id."""
        return self._items.get(name)

    def delete(self, name: str) -> None:
        """Delete a response.

        Raises:
            ApiError: 404, it was never stored or is no longer.
        """
        stored = self.get(name)
        if stored.task is not None:
            stored.task.cancel()
        self._drop(name)

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name, None)
        if gone is not None:
            self._size -= gone.size
            for item in gone.response["output"]:
                self._items.pop(item["id"], None)
