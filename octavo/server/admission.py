"""`Admission`: limits on waiting requests. Beyond them a request is refused at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.core.errors import InvalidRequestError, QueueFullError
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.core.stats import EngineStats
from octavo.server.board import Board, Count

_MAX_RETRY_AFTER_S = 60


def client_priority(priority: int, param: str) -> int:
    """Return a priority that a client has chosen. Raise InvalidRequestError if it is one of background work, which is
    exempt from the limits. `param` is the field or header that it is from."""
    if priority >= BACKGROUND:
        text = f"{param} must be less than {BACKGROUND}: from there on, priorities are the server's own. Lower it."
        raise InvalidRequestError(text, param=param, value=priority)
    return priority


class Admission:
    """Counts the requests that this server has sent to the engine; unlike the engine's counters, without delay.

    Args:
        max_requests, max_tokens: limits on waiting choices, and on their prompt tokens; None for no limit.
        max_tenant_requests: limit on each tenant's requests, running or waiting; None for no limit.
        seats: number of choices that the engine runs at once.
        stats: the engine's counters.
        refused: reason -> number of refused requests, incremented here.
        board: the counts; a board shared by several processes makes the limits apply to all of them together.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        max_tenant_requests: int | None = None,
        *,
        seats: int,
        stats: Callable[[], EngineStats],
        refused: Counter[str],
        board: Board,
    ) -> None:
        self._refused = refused
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_tenant_requests = max_tenant_requests
        self._seats = seats
        self._stats = stats
        self._board = board
        self._tokens: dict[str, int] = {}

    @property
    def load(self) -> int:
        """Number of choices running or waiting."""
        return self._board.total(Count.CHOICES) + self._board.total(Count.BACKGROUND)

    def enter(self, request: GenerateRequest) -> None:
        """Admit a request; every admitted request ends with `leave`. Background work is exempt from the limits.

        Raises:
            QueueFullError: a limit is reached.
        """
        if request.priority >= BACKGROUND:
            self._board.add(Count.BACKGROUND, request.params.n)
            return
        with self._board.alone():
            self._check(request)
            self._check_tenant(request)
            if self._max_tenant_requests is not None:
                self._board.add_tenant(request.tenant, 1)
            self._board.add(Count.CHOICES, request.params.n)
            self._board.add(Count.QUEUED, 1)
            self._board.add(Count.QUEUED_TOKENS, len(request.tokens))
        self._tokens[request.id] = len(request.tokens)

    def begun(self, request: GenerateRequest) -> None:
        """Count a request as no longer waiting: its first output has arrived."""
        tokens = self._tokens.pop(request.id, None)
        if tokens is not None:
            self._board.add(Count.QUEUED, -1)
            self._board.add(Count.QUEUED_TOKENS, -tokens)

    def leave(self, request: GenerateRequest) -> None:
        if request.priority >= BACKGROUND:
            self._board.add(Count.BACKGROUND, -request.params.n)
            return
        self._board.add(Count.CHOICES, -request.params.n)
        if self._max_tenant_requests is not None:
            self._board.add_tenant(request.tenant, -1)
        self.begun(request)

    def _check_tenant(self, request: GenerateRequest) -> None:
        most = self._max_tenant_requests
        if most is None or self._board.of_tenant(request.tenant) < most:
            return
        self._refused["tenant"] += 1
        whose = f"Tenant {request.tenant!r} has" if request.tenant else "Clients without a tenant have"
        raise QueueFullError(
            f"{whose} {most} requests here, as many as --max-tenant-requests allows. Send this one when one has ended.",
            retry_after_s=1,
        )

    def _check(self, request: GenerateRequest) -> None:
        choices = self._board.total(Count.CHOICES)
        waiting = self._waiting(choices)
        free = max(0, self._seats - choices)
        if self._max_requests is not None and waiting + request.params.n > self._max_requests + free:
            self._refused["requests"] += 1
            raise self._full(
                f"{waiting} requests are waiting, and --max-num-queued-reqs is {self._max_requests}", waiting
            )
        queued = self._board.total(Count.QUEUED_TOKENS)
        if (
            self._max_tokens is not None
            and queued + len(request.tokens) > self._max_tokens
            and self._board.total(Count.QUEUED)
        ):
            self._refused["tokens"] += 1
            text = f"{queued} prompt tokens are waiting, and --max-num-queued-tokens is {self._max_tokens}"
            raise self._full(text, waiting)

    def _waiting(self, choices: int) -> int:
        waiting = self._stats().num_waiting - self._board.total(Count.BACKGROUND) if choices else 0
        return max(0, choices - self._seats, waiting)

    def _full(self, why: str, waiting: int) -> QueueFullError:
        seconds = min(_MAX_RETRY_AFTER_S, 1 + waiting // max(self._seats, 1))
        return QueueFullError(f"The queue is full: {why}. Try again later.", retry_after_s=seconds)
