"""`EngineLoop`: the only loop there is. Its depth is a number: 0 is synchronous, 1 overlaps, the stages pipeline."""

from __future__ import annotations

import logging
import time
from collections import deque

from octavo.core.errors import internal_error
from octavo.core.output import TokenDelta
from octavo.core.plan import StepPlan
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
        self._ahead: tuple[StepPlan, Step] | None = None
        self._launched = False
        self._plan_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._flight) or self._ahead is not None or self._scheduler.has_work

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

    def reset_prefix_cache(self) -> None:
        """Forget what the KV cache holds of past prompts; what runs keeps its blocks."""
        self._scheduler.cache.reset()

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
            self._ahead = None
            news += self._scheduler.recover(internal_error(error))
        return news

    def _step(self, news: list[TokenDelta]) -> None:
        """Plan step n + 1 from bounds while the device runs n, launch it, and only then look at the tokens of n.

        A step that can't be sampled before those are known is sampled after them. The next one is then begun at once,
        so that the device needn't wait for whoever is told the news.

        What there is to tell goes into `news` at once, so that a later failure can't swallow it.
        """
        began = time.perf_counter()
        self._plan_s = 0.0
        begun, self._ahead = self._ahead or self._begin(news), None
        self._launched = begun is not None
        if begun is None:
            if self._flight:
                news += self._retire()
            elif not news:  # else one was refused, and who waited behind it may run now
                news += self._unstick()
        else:
            plan, step = begun
            while plan.needs_feedback and self._flight:
                news += self._retire()
            self._executor.sample(step, self._scheduler.payload(plan))
            self._flight.append(step)
            if plan.needs_feedback and self._depth:
                self._ahead = self._begin(news)
        launched = time.perf_counter()
        while len(self._flight) > self._depth:
            news += self._retire()
        self._scheduler.count_times(
            plan=self._plan_s, launch=launched - began - self._plan_s, retire=time.perf_counter() - launched
        )

    def _begin(self, news: list[TokenDelta]) -> tuple[StepPlan, Step] | None:
        """Plan a step, if there is something to compute, and launch it up to its logits."""
        began = time.perf_counter()
        plan = self._scheduler.plan()
        self._plan_s += time.perf_counter() - began
        news += self._scheduler.take_refused()
        step = None if plan is None else self._executor.forward(plan)
        return None if plan is None or step is None else (plan, step)

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
