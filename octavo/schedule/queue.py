"""`WaitingQueue`: requests that don't run, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from octavo.core.request import Request
from octavo.schedule.policy import Policy, Rank


class WaitingQueue:
    """A heap by `policy.rank`, which is unique. Requests that end while they wait are dropped when they surface."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._policy.rank(request), request))
        self._size += 1

    def peek(self) -> Request | None:
        """The first that has not ended, or None."""
        while self._heap and self._heap[0][1].finish is not None:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Remove what `peek` returned."""
        heapq.heappop(self._heap)
        self._size -= 1

    def remove(self, request: Request) -> None:
        """Remove a request from wherever it stands."""
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)
        self._size -= 1

    def refill(self, requests: Iterable[Request]) -> None:
        """Exactly these wait from now on."""
        self._heap = [(self._policy.rank(request), request) for request in requests]
        heapq.heapify(self._heap)
        self._size = len(self._heap)

    def discard(self) -> None:
        """Count out a request that has just ended while it waited."""
        self._size -= 1
