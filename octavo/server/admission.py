"""`Admission`: how many requests may wait. Beyond that a request is refused at once rather than kept waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.core.errors import QueueFullError
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.core.stats import EngineStats

_MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts what this server has sent to the engine: its own books are never behind, as the engine's counters are.

    Args:
        max_requests, max_tokens: limits on waiting choices, and on prompt tokens that were not begun; None for none.
        seats: choices that the engine runs at once.
        stats: the engine's counters.
        refused: reason -> requests refused, counted up.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        *,
        seats: int,
        stats: Callable[[], EngineStats],
        refused: Counter[str],
    ) -> None:
        self._refused = refused
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._seats = seats
        self._stats = stats
        self._choices = 0
        self._in_background = 0
        self._tokens: dict[str, int] = {}

    @property
    def load(self) -> int:
        """Choices that are being generated or wait."""
        return self._choices + self._in_background

    def enter(self, request: GenerateRequest) -> None:
        """Take a request in; each that is taken in leaves by `leave`. Background work neither meets nor fills limits.

        Raises:
            QueueFullError: it would have to wait behind too many.
        """
        if request.priority >= BACKGROUND:
            self._in_background += request.params.n
            return
        waiting = self._waiting()
        if self._max_requests is not None and waiting + request.params.n > self._max_requests + self._free():
            self._refused["requests"] += 1
            raise self._full(
                f"{waiting} requests are waiting, and --max-num-queued-reqs is {self._max_requests}", waiting
            )
        queued = sum(self._tokens.values())
        if self._max_tokens is not None and queued + len(request.tokens) > self._max_tokens and self._tokens:
            self._refused["tokens"] += 1
            text = f"{queued} prompt tokens are waiting, and --max-num-queued-tokens is {self._max_tokens}"
            raise self._full(text, waiting)
        self._choices += request.params.n
        self._tokens[request.id] = len(request.tokens)

    def begun(self, request: GenerateRequest) -> None:
        """Its first token is there."""
        self._tokens.pop(request.id, None)

    def leave(self, request: GenerateRequest) -> None:
        if request.priority >= BACKGROUND:
            self._in_background -= request.params.n
            return
        self._choices -= request.params.n
        self._tokens.pop(request.id, None)

    def _free(self) -> int:
        return max(0, self._seats - self._choices)

    def _waiting(self) -> int:
        waiting = self._stats().num_waiting - self._in_background if self._choices else 0
        return max(0, self._choices - self._seats, waiting)

    def _full(self, why: str, waiting: int) -> QueueFullError:
        seconds = min(_MAX_RETRY_AFTER_S, 1 + waiting // max(self._seats, 1))
        return QueueFullError(f"The queue is full: {why}. Try again later.", retry_after_s=seconds)
