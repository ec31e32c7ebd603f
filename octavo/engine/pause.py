"""`PauseState`: hold requests during a pause. `SleepState`: track which memory was freed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import EngineStateError, InvalidRequestError, id_in_use, internal_error
from octavo.core.output import FinishReason, TokenDelta, failed
from octavo.core.pausing import AWAKE, PauseMode, SleepTag
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.spans import Spans
from octavo.engine.executor import AnyExecutor, LaunchedStep, WorkerPort
from octavo.schedule.limits import checked_max_tokens
from octavo.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that a pause holds, and the indices of its choices that were aborted meanwhile."""

    request: GenerateRequest
    aborted: set[int] = field(default_factory=set)

    @property
    def rest(self) -> list[int]:
        """Indices of the choices that are to be computed."""
        return [index for index in range(self.request.params.n) if index not in self.aborted]


class PauseState:
    """Passes requests to a scheduler. During a pause, checks them and holds them in order until it ends.

    Attributes:
        closed: whether the engine is paused, so that new requests are held.
        frozen: whether the scheduler's requests are paused, too.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.closed = False
        self.frozen = False
        self._scheduler = scheduler
        self._held: dict[str, _Held] = {}

    @property
    def num_held(self) -> int:
        """Number of held choices."""
        return sum(len(held.rest) for held in self._held.values())

    def add(self, request: GenerateRequest) -> None:
        """Queue a request, or hold it during a pause.

        Raises:
            InvalidRequestError: it can never fit, or its id is in use.
        """
        if not self.closed:
            self._scheduler.add(request)
            return
        if request.id in self._held or request.id in self._scheduler:
            raise id_in_use(request.id)
        checked_max_tokens(request, self._scheduler.cache, self._scheduler.limits)
        self._held[request.id] = _Held(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """End a request, or one choice of it, and return its last deltas. A held request is never queued for this."""
        held = self._held.get(request_id)
        if held is None:
            return self._scheduler.abort(request_id, index)
        ending = [one for one in held.rest if index in (None, one)]
        held.aborted.update(ending)
        if not held.rest:
            del self._held[request_id]
        return [TokenDelta(request_id, one, [], finish=FinishReason.ABORT) for one in ending]

    def close(self, mode: PauseMode) -> list[TokenDelta]:
        """Start a pause of this mode; return the last deltas of requests that it aborts."""
        self.closed, self.frozen = True, mode is PauseMode.KEEP
        return self._scheduler.abort(None) if mode is PauseMode.ABORT else []

    def open(self) -> list[TokenDelta]:
        """End the pause and queue the held requests; return the last deltas of those that are refused now."""
        self.closed = self.frozen = False
        waiting, self._held = self._held, {}
        return [delta for held in waiting.values() for delta in self._admit(held)]

    def _admit(self, held: _Held) -> list[TokenDelta]:
        request = held.request
        try:
            self._scheduler.add(request)
        except InvalidRequestError as error:
            return failed(request.id, held.rest, error.message, refused=error.param or "")
        except Exception as error:  # ends this request only
            log.exception("request %s could not be queued after a pause; it ends", request.id)
            return failed(request.id, held.rest, internal_error(error))
        ended = [delta for index in held.aborted for delta in self._scheduler.abort(request.id, index)]
        return [delta for delta in ended if delta.index not in held.aborted]  # the others were sent by `abort`


class NoExecutor:
    """The executor of an engine whose KV cache is asleep. It runs nothing."""

    def forward(self, plan: StepPlan) -> LaunchedStep:
        raise AssertionError("a step was planned although the engine sleeps")

    def sample(self, step: LaunchedStep, payload: dict[str, Any]) -> None:
        """Never called: no step is launched."""

    def watch(self, spans: Spans) -> None:
        """Do nothing: there are no steps."""


class SleepState:
    """The engine's sleep level, and the parts that sleep.

    Attributes:
        level: sleep level; AWAKE while the engine is awake.
        empty: whether the executor was freed and no new one has been made.
    """

    def __init__(self, worker: WorkerPort) -> None:
        self.level = AWAKE
        self._worker = worker
        self._asleep: set[SleepTag] = set()
        self._freed = False
        """The worker has freed the memory of all parts that sleep; not if that failed."""
        self.empty = False

    def check(self, level: int) -> None:
        """Raise EngineStateError if the engine can't sleep at this level."""
        if level and not self._worker.can_sleep:
            raise EngineStateError(
                "The engine was not started for sleeping, so it keeps its memory; start it with --enable-sleep-mode "
                "(enable_sleep_mode=True)."
            )

    def check_awake(self) -> None:
        """Raise EngineStateError if anything sleeps."""
        if self.level != AWAKE:
            raise EngineStateError("The engine sleeps, so it can't resume; wake it up instead (/wake_up).")

    def check_has(self, part: SleepTag) -> None:
        """Raise EngineStateError if this part sleeps."""
        if part in self._asleep:
            raise EngineStateError(
                f"The engine sleeps and holds no {part}; wake that part up first (/wake_up?tags={part})."
            )

    def sleep(self, level: int) -> None:
        """Sleep at this level, or stay at a deeper one. From level 1 on, nothing may hold the executor.

        If the worker fails to free its memory, the engine sleeps all the same: the executor is gone, so only a wake-up
        repairs it.
        """
        self.check(level)
        if not level:
            if self.level == AWAKE:
                self._asleep, self.level = {SleepTag.SCHEDULING}, level
            return
        level = max(level, self.level) if SleepTag.WEIGHTS in self._asleep else level
        parts = {SleepTag.WEIGHTS, SleepTag.KV_CACHE}
        if self._freed and (level, parts) == (self.level, self._asleep):
            return
        self.empty, self._asleep, self.level, self._freed = True, parts, level, False
        self._worker.sleep(level)
        self._freed = True

    def wake_up(self, parts: Iterable[SleepTag]) -> AnyExecutor | None:
        """Wake these parts. Return a new executor if the old one was freed and no part sleeps any more."""
        for part in parts:
            if part in self._asleep:
                if part is not SleepTag.SCHEDULING:
                    self._worker.wake_up(part)
                self._asleep.discard(part)
        if self._asleep:
            return None
        executor = self._worker.executor() if self.empty else None
        self.empty, self.level = False, AWAKE
        return executor
