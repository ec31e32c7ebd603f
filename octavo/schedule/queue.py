"""Queues of waiting requests: by a rank that each has from the start, or in a line per tenant."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from octavo.schedule.request import Request
from octavo.schedule.shares import Account, Accounts

Rank = tuple[int, ...]


class Queue(Protocol):
    """Requests without a slot. Those that end while they wait are dropped when they come first."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """Return the first request that has not ended, or None."""
        ...

    def pop(self) -> None:
        """Remove what the last `peek` returned."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        ...

    def refill(self, requests: Iterable[Request]) -> None:
        """Replace the contents by these requests."""
        ...

    def discard(self) -> None:
        """Reduce the size by a request that has just ended while it waited."""
        ...


class RankedQueue:
    """A heap by `rank`, which is unique and does not change."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, Request]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._rank(request), request))
        self._size += 1

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].finish is not None:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)
        self._size -= 1

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[1] is not request]
        heapq.heapify(self._heap)
        self._size -= 1

    def refill(self, requests: Iterable[Request]) -> None:
        self._heap = [(self._rank(request), request) for request in requests]
        heapq.heapify(self._heap)
        self._size = len(self._heap)

    def discard(self) -> None:
        self._size -= 1


class FairQueue:
    """A line per tenant, in order of arrival; first is the head of the line whose account has had the least.

    Requests that were preempted keep the rank with which they began, and stand beside the lines.
    """

    def __init__(self, accounts: Accounts, rank: Callable[[Request], Rank]) -> None:
        self._accounts = accounts
        self._rank = rank
        self._size = 0
        self._begun = RankedQueue(rank)
        self._lines: dict[Account, _Line] = {}
        self._heads: list[tuple[Rank, int, _Line]] = []
        """A heap of lines by the rank of their first request. An entry counts if it has the line's present rank."""
        self._entries = 0
        self._first: _Line | None = None
        """Where the last `peek` found its request; None: among those that were preempted."""
        accounts.on_change = self._changed

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        self._size += 1
        if request.turn >= 0:
            self._begun.push(request)
            return
        account = self._accounts.of(request)
        line = self._lines.get(account)
        if line is None:
            line = self._lines[account] = _Line(account)
            self._accounts.join(account)
        heapq.heappush(line.requests, (request.order, request))
        if line.requests[0][1] is request:
            self._place(line)

    def peek(self) -> Request | None:
        begun, line = self._begun.peek(), self._first_line()
        if begun is not None and (line is None or self._rank(begun) < line.rank):
            self._first = None
            return begun
        self._first = line
        return None if line is None else line.requests[0][1]

    def pop(self) -> None:
        self._size -= 1
        line = self._first
        if line is None:
            self._begun.pop()
            return
        heapq.heappop(line.requests)
        self._place(line)

    def remove(self, request: Request) -> None:
        found = request.turn >= 0
        if found:
            self._begun.remove(request)
        else:
            line = self._lines[self._accounts.of(request)]
            line.requests = [entry for entry in line.requests if entry[1] is not request]
            heapq.heapify(line.requests)
            self._place(line)
        self._size -= 1

    def refill(self, requests: Iterable[Request]) -> None:
        given = list(requests)
        for account in self._lines:
            account.waits = False
        self._lines.clear()
        self._heads.clear()
        self._first = None
        self._begun.refill(request for request in given if request.turn >= 0)
        for request in given:
            if request.turn < 0:
                account = self._accounts.of(request)
                account.waits = True
                line = self._lines.setdefault(account, _Line(account))
                line.requests.append((request.order, request))
        for line in self._lines.values():
            heapq.heapify(line.requests)
            self._place(line)
        self._size = len(given)

    def discard(self) -> None:
        self._size -= 1

    def _first_line(self) -> _Line | None:
        while self._heads:
            rank, _, line = self._heads[0]
            if rank != line.rank or not line.requests:
                heapq.heappop(self._heads)
            elif line.requests[0][1].finish is not None:
                self._place(line)
            else:
                return line
        return None

    def _changed(self, account: Account) -> None:
        line = self._lines.get(account)
        if line is not None:
            self._place(line)

    def _place(self, line: _Line) -> None:
        """Put a line where the rank of its first request belongs; forget it if it is empty."""
        while line.requests and line.requests[0][1].finish is not None:
            heapq.heappop(line.requests)
        if not line.requests:
            line.account.waits = False
            del self._lines[line.account]
            return
        rank = self._rank(line.requests[0][1])
        if rank == line.rank:
            return
        line.rank = rank
        self._entries += 1
        heapq.heappush(self._heads, (rank, self._entries, line))
        if len(self._heads) > 2 * len(self._lines) + 64:
            self._heads = [(other.rank, number, other) for number, other in enumerate(self._lines.values())]
            heapq.heapify(self._heads)


class _Line:
    """The waiting requests of one account, as a heap by arrival, and the rank of the first."""

    __slots__ = ("account", "rank", "requests")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.requests: list[tuple[int, Request]] = []
        self.rank: Rank = ()
