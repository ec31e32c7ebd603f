"""`EngineLoop`: plan, launch and retire steps. At depth 0 it is synchronous, at depth 1 launches overlap."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from octavo.core.errors import DeviceLostError, EngineStateError, internal_error
from octavo.core.output import TokenDelta
from octavo.core.pausing import AWAKE, PauseMode, SleepTag
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.spans import Watched
from octavo.core.stats import EngineStats
from octavo.engine.executor import AnyExecutor, FixedWorker, LaunchedStep, Staged, WorkerPort
from octavo.engine.pause import NoExecutor, PauseState, SleepState
from octavo.engine.profile import Profiler
from octavo.engine.realms import Realms
from octavo.engine.record import Recorder
from octavo.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

_STORES_S = 5.0
"""Longest time that a closing engine waits for stores."""


class EngineLoop:
    """A scheduler and an executor, driven one step at a time: call `step` while `busy`, and deliver what it returns."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: AnyExecutor,
        depth: int = 0,
        *,
        worker: WorkerPort | None = None,
        profiler: Profiler | None = None,
        content: str = "",
    ) -> None:
        """
        Args:
            depth: steps launched ahead of the oldest one whose tokens are not known.
            worker: the executor's worker; None for an executor that is never replaced.
            profiler: makes profiles; None if the engine was not started for them.
            content: what KV pages depend on besides tokens and updates of the weights; see `Realms`.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._worker = worker or FixedWorker()
        self._pause = PauseState(scheduler)
        self._sleep = SleepState(self._worker)
        self._realms = Realms(content, self._worker, scheduler)
        self._profiler = profiler
        self._recorder: Recorder | None = None
        self._lost: DeviceLostError | None = None
        self._depth = depth
        self._flight: deque[LaunchedStep] = deque()
        self._ahead: tuple[StepPlan, LaunchedStep] | None = None
        self._launched = False
        self._plan_s = 0.0

    def record(self, recorder: Recorder) -> None:
        """Record all steps from now on. No step is in flight."""
        self._recorder = recorder
        self._executor = self._recorded(self._executor)

    def _recorded(self, executor: AnyExecutor) -> AnyExecutor:
        return self._recorder.around(executor, self._scheduler.names_of) if self._recorder else executor

    @property
    def lost(self) -> DeviceLostError | None:
        """Why nothing can be computed any more; None while the device works. Never reset."""
        return self._lost

    def check_alive(self) -> None:
        """Raise DeviceLostError if the device is lost."""
        if self._lost is not None:
            raise self._lost

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run work outside of steps; if it fails because the device is lost, raise DeviceLostError instead."""
        self.check_alive()
        try:
            yield
        except Exception as error:
            lost = self._loss(error)
            if lost is not None and lost is not error:
                raise lost from error
            raise

    @property
    def busy(self) -> bool:
        if self._lost is not None:
            return False
        scheduler = self._scheduler
        return self._in_flight or (scheduler.has_work and not self._pause.frozen) or scheduler.transferring

    @property
    def awaits(self) -> bool:
        """Whether threads of features work on something, so that `idle` should be called soon again."""
        return self._lost is None and any(hook.awaits for hook in self._scheduler.turning)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, so that new requests wait."""
        return self._pause.closed

    @property
    def settled(self) -> bool:
        """Whether a pause is complete: nothing runs before its end."""
        return self._pause.closed and not self.busy

    @property
    def _in_flight(self) -> bool:
        return bool(self._flight) or self._ahead is not None

    @property
    def starved(self) -> bool:
        """Whether the last step computed nothing, and no transfer ended. The caller should wait a moment before the
        next one."""
        return not self._launched and not self._flight

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never fit.
            DeviceLostError: nothing can be computed any more.
        """
        self.check_alive()
        self._pause.add(request)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        return self._pause.abort(request_id, index)

    def pause(self, mode: PauseMode) -> list[TokenDelta]:
        """Hold new requests, and abort, finish or freeze the others; `settled` becomes true once that is done.

        May be called during a pause.
        """
        self.check_alive()
        news = self._pause.close(mode)
        self._pause.frozen |= self._sleep.level != AWAKE
        return news

    def check_sleep(self, level: int) -> None:
        """Raise EngineStateError if the engine was not started for this sleep level."""
        self._sleep.check(level)

    def resume(self) -> list[TokenDelta]:
        """End a pause. Raise EngineStateError while the engine sleeps."""
        self.check_alive()
        self._sleep.check_awake()
        return self._pause.open()

    def sleep(self, level: int) -> None:
        """Free the memory of this sleep level (`core/pausing.py`). The pause must have settled.

        Paused requests are recomputed after the wake-up. Raises as `check_sleep`, and EngineStateError while blocks are
        leased, whose contents would be lost.
        """
        self._sleep.check(level)
        if level:
            self._check_unleased()
        self._end_profile()  # it holds the executor
        self._pause.close(PauseMode.KEEP)
        with self._guarded():
            if level and not self._sleep.empty:
                self._scheduler.park()
                self._scheduler.has_blocks(there=False)
                self._executor = NoExecutor()  # the old one's memory is freed once nothing holds it
            self._sleep.sleep(level)

    def _check_unleased(self) -> None:
        owners = self._scheduler.lessees()
        if owners:
            raise EngineStateError(
                f"KV blocks are leased by {', '.join(owners)} and would be lost in a sleep; try again when they are "
                "released."
            )

    def wake_up(self, parts: Iterable[SleepTag]) -> list[TokenDelta]:
        """Allocate the memory of these parts again. The pause ends once no part sleeps."""
        self.check_alive()
        if self._sleep.level == AWAKE:
            return []
        with self._guarded():
            executor = self._sleep.wake_up(parts)
        if executor is not None:
            self._executor = self._recorded(executor)
            self._scheduler.has_blocks(there=True)
            self._realms.refresh()
        return self._pause.open() if self._sleep.level == AWAKE else []

    def check_weights(self) -> WorkerPort:
        """Return the worker, which stages weights.

        Raises:
            UnsupportedError: the weights can't be replaced.
            EngineStateError: the weights are asleep.
        """
        self.check_alive()
        self._worker.check_weights()
        self._sleep.check_has(SleepTag.WEIGHTS)
        return self._worker

    @property
    def worker(self) -> WorkerPort:
        """The worker, for programs that call functions with it."""
        return self._worker

    def update_weights(self, staged: Staged, version: str | None = None, *, flush_cache: bool = True) -> None:
        """Replace the weights. A pause must have settled.

        Args:
            staged: the new weights.
            version: their name; None for a generated one.
            flush_cache: drop cached prompts and recompute paused requests; otherwise keep both.

        Raises:
            UnsupportedError, EngineStateError: as `check_weights`, with nothing changed.
        """
        self.check_weights()
        self._end_profile()  # it watches kernels that read the old weights
        if self._recorder is not None:
            self._recorder.stop("the weights were replaced")
        if flush_cache:
            self._scheduler.park()
        with self._guarded():
            staged.put_in_place(version, rescale=flush_cache)
        self._realms.replaced(version, flushed=flush_cache)
        self._scheduler.weights_replaced()

    def start_profile(self, prefix: str = "") -> None:
        """Profile each step until `stop_profile`, or until the profile reaches its limits.

        Args:
            prefix: start of the trace's file name.

        Raises:
            EngineStateError: the engine was not started for profiles, or a profile is running.
        """
        self.check_alive()
        profiler = self._profiler
        if profiler is None:
            raise EngineStateError(
                "The engine was not started for profiles; start it with "
                '--profiler-config \'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\' (profiler_config={...}).'
            )
        spans = profiler.start(prefix)
        spans.replace(self, "step", profiler.counted(self.step))
        for part in (
            Watched(self._scheduler, "plan", "plan"),
            Watched(self._executor, "forward", "execute", profiler.about),
            Watched(self._scheduler, "payload", "payload"),
            Watched(self._executor, "sample", "sample"),
            Watched(self, "_retire", "retire"),
            Watched(self._scheduler, "commit", "update"),
        ):
            spans.watch(part)
        self._executor.watch(spans)

    def stop_profile(self) -> str:
        """End the profile; return the path of its trace, or "" if there was no profile."""
        return "" if self._profiler is None else self._profiler.stop()

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.end()

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any | Future[Any]:
        """Call `EngineHook.call` of a feature; return its result, or a future of it that needs further steps or none.

        Raises:
            InvalidRequestError: there is no such feature, or it refuses the call.
        """
        self.check_alive()
        return self._scheduler.call(feature, method, args)

    def idle(self) -> None:
        """Check workers and profile; call periodically while the engine is idle. Raises DeviceLostError."""
        with self._guarded():
            self._worker.check()
        self._scheduler.turn()
        if self._scheduler.storing and self._sleep.level == AWAKE:
            self.step()
        if self._profiler is not None:
            self._profiler.end_if_due()

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.num_waiting += self._pause.num_held
        stats.paused, stats.sleep_level = self._pause.closed, self._sleep.level
        stats.weight_version = self._worker.weight_version
        return stats

    def check_idle(self, *, books: bool = True) -> None:
        """Check, while nothing runs, that no KV block leaked. Raise AssertionError if one did.

        Args:
            books: also check that all that tell where blocks are agree, for which a request that comes would wait.
        """
        if not self._scheduler.has_work:  # otherwise paused requests hold blocks
            self._scheduler.check_idle(books=books)

    def mend(self) -> None:
        """Free what `check_idle` has found, and drop cached prompts. Nothing runs or waits."""
        self._scheduler.recover("")

    def reset_prefix_cache(self) -> None:
        """Drop cached prompts. Running requests keep their blocks."""
        self._scheduler.reset()

    def forget_past(self) -> None:
        """Reset counters and cache, as after a warm-up."""
        self._scheduler.forget_past()

    def close(self) -> None:
        """Free the device. A lost device is freed by the end of its process only."""
        if self._lost is None:
            self._end_stores()
        if self._recorder is not None:
            self._recorder.close()
        if self._lost is not None:
            return
        self._end_profile()
        self._worker.close()

    def _end_stores(self) -> None:
        """Wait, for a limited time, until pages are in their tier, which may outlast this engine."""
        scheduler, until = self._scheduler, time.monotonic() + _STORES_S
        if scheduler.has_work or self._sleep.level != AWAKE:
            return
        try:
            while scheduler.storing and time.monotonic() < until:
                self.step()
            scheduler.turn()
        except DeviceLostError as error:
            log.warning("some KV blocks were not kept: %s", error)

    def step(self) -> list[TokenDelta]:
        """Launch one step if there is something to compute, and retire the steps beyond the depth.

        A failed step is recovered by `Scheduler.recover`, unless the device was lost. Deltas made before a failure are
        still returned.

        Raises:
            DeviceLostError: the device is lost, now or since an earlier step, and no deltas are left to return.
        """
        if self._lost is not None:
            raise self._lost
        news: list[TokenDelta] = []
        try:
            self._step(news)
        except Exception as error:
            self._flight.clear()
            self._ahead = None
            lost = self._loss(error)
            if lost is None:
                log.exception("a step failed; if it had several requests, they are recomputed one by one")
                news += self._scheduler.recover(internal_error(error))
            elif not news:
                raise lost from (None if lost is error else error)
        return news

    def _loss(self, error: Exception) -> DeviceLostError | None:
        """Record the loss of the device if `error` is or shows one, and return it; None if the device still works."""
        self._lost = error if isinstance(error, DeviceLostError) else self._worker.loss(error)
        if self._lost is not None:
            log.critical("the engine stops: %s", self._lost, exc_info=error)
            self._worker.abandon()
        return self._lost

    def _step(self, news: list[TokenDelta]) -> None:
        """Plan step n + 1 from bounds while the device runs n, launch it, and only then read the tokens of n.

        A step that needs those tokens is sampled after they are read. The next one is then launched at once, so that
        the device never waits for output delivery.

        Deltas are added to `news` as they are made, so that a later failure can't lose them.
        """
        began = time.perf_counter()
        self._plan_s = 0.0
        begun, self._ahead = self._ahead or self._begin(news), None
        self._launched = begun is not None
        if begun is None:
            if self._flight:
                news += self._retire()
            elif not news:  # else a request was refused, and one behind it may run now
                news += self._unstick()
        else:
            plan, step = begun
            while plan.needs_feedback and self._flight and self._scheduler.awaits_tokens(plan):
                news += self._retire()
            self._executor.sample(step, self._scheduler.payload(plan))
            self._flight.append(step)
            if not plan.slots:
                self._await_reports(news)
            if plan.needs_feedback and self._depth:
                self._ahead = self._begin(news)
        launched = time.perf_counter()
        while len(self._flight) > self._depth:
            news += self._retire()
        self._scheduler.counters.times(
            plan=self._plan_s, launch=launched - began - self._plan_s, retire=time.perf_counter() - launched
        )

    def _await_reports(self, news: list[TokenDelta]) -> None:
        """Retire a step without rows at once, and all before it: it was launched because nothing else can be."""
        self._launched = False
        while self._flight:
            news += self._retire()

    def _begin(self, news: list[TokenDelta]) -> tuple[StepPlan, LaunchedStep] | None:
        """Plan a step, if there is something to compute, and launch it up to its logits."""
        began = time.perf_counter()
        plan = self._scheduler.plan_transfers() if self._pause.frozen else self._scheduler.plan()
        self._plan_s += time.perf_counter() - began
        news += self._scheduler.take_refused()
        step = None if plan is None else self._executor.forward(plan)
        return None if plan is None or step is None else (plan, step)

    def _retire(self) -> list[TokenDelta]:
        step = self._flight.popleft()
        output = step.result()
        if output.moved:
            self._launched = True  # a request may have waited for these pages: the next plan must not wait
        return self._scheduler.commit(step.plan, output)

    def _unstick(self) -> list[TokenDelta]:
        """Fail the first waiting request if nothing runs and nothing can be planned, rather than wait forever."""
        if self._pause.frozen or not self._scheduler.is_stuck:
            return []
        log.error("no waiting request can be scheduled although none runs; the first one ends with an error")
        return self._scheduler.fail_head(
            "The request could not be scheduled on an idle engine; this is a bug in Octavo."
        )
