"""`EngineLoop`: the only loop there is. Its depth is a number: 0 is synchronous, 1 overlaps, the stages pipeline."""

from __future__ import annotations

import logging
import time
from collections import deque

from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.executor import Executor, Step
from octavo.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)


class EngineLoop:
    """Scheduler and executor, one step at a time: whoever drives it calls `step` while `busy` and sends the news on."""

    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int = 0) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._flight: deque[Step] = deque()
        self._launched = False

    @property
    def busy(self) -> bool:
        return bool(self._flight) or self._scheduler.has_work

    @property
    def starved(self) -> bool:
        """Whether the last step found nothing to do but wait for a feature: the caller should pause a moment."""
        return not self._launched and not self._flight

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it can never fit."""
        self._scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        return self._scheduler.abort(request_id, index)

    def stats(self) -> EngineStats:
        return self._scheduler.stats()

    def check_idle(self) -> None:
        """Compare the books while nothing runs. Raises AssertionError if a block leaked."""
        self._scheduler.check_idle()

    def forget_past(self) -> None:
        """Start counting and caching anew, as after a warm-up."""
        self._scheduler.forget_past()

    def close(self) -> None:
        self._executor.close()

    def step(self) -> list[TokenDelta]:
        """Launch one step if there is something to compute, and retire those that the depth asks for."""
        news: list[TokenDelta] = []
        try:
            self._step(news)
        except Exception as error:
            log.exception("a step failed; if several requests were in it, they run again one by one")
            self._flight.clear()
            news += self._scheduler.recover(f"{type(error).__name__}: {error}")
        return news

    def _step(self, news: list[TokenDelta]) -> None:
        """Plan step n + 1 from bounds while the device runs n, launch it, and only then look at the tokens of n.

        What there is to tell goes into `news` at once, so that a later failure can't swallow it.
        """
        began = time.perf_counter()
        plan = self._scheduler.plan()
        planned = time.perf_counter()
        self._launched = plan is not None
        news += self._scheduler.take_refused()
        step = None if plan is None else self._executor.forward(plan)
        if plan is None or step is None:
            news += self._retire() if self._flight else self._unstick()
        else:
            while plan.needs_feedback and self._flight:
                news += self._retire()
            self._executor.sample(step, self._scheduler.payload(plan))
            self._flight.append(step)
        launched = time.perf_counter()
        while len(self._flight) > self._depth:
            news += self._retire()
        self._scheduler.count_times(
            plan=planned - began, launch=launched - planned, retire=time.perf_counter() - launched
        )

    def _retire(self) -> list[TokenDelta]:
        step = self._flight.popleft()
        return self._scheduler.commit(step.plan, step.result())

    def _unstick(self) -> list[TokenDelta]:
        """Nothing runs and nothing can be planned: better to refuse the head of the queue than to wait for ever."""
        if not self._scheduler.is_stuck:
            return []
        log.error("nothing can be scheduled although nothing runs; the first waiting request is refused")
        return self._scheduler.fail_head(
            "The request could not be scheduled on an idle engine; this is a bug in Octavo."
        )
