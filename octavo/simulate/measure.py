"""Measure the steps of a running engine: alone by size, then in a mixed load that the model is tested with."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.cache_groups import CacheGroup
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.output import StepOutput
from octavo.core.params import SamplingParams
from octavo.core.plan import StepPlan
from octavo.core.request import GenerateRequest
from octavo.core.spans import Spans
from octavo.engine.executor import AnyExecutor, LaunchedStep
from octavo.engine.loop import EngineLoop
from octavo.schedule.limits import Limits
from octavo.simulate.model import MeasuredStep
from octavo.simulate.shape import ShapeReader, StepShape

_STEPS = 8
"""Measured steps of each number of rows."""
_SHORT = 16
"""Tokens of prompts that do not matter."""
_LONG = 1024
_MIXED = 48
"""Requests of the mixed load."""


class StepTimer:
    """A `Recorder` that times steps: on a device that computes ahead, from the end of the one before to its own."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._shapes = ShapeReader(groups)
        self.steps: list[MeasuredStep] = []
        self.ended_at = 0.0
        self.drafts = False
        """A step had or asked for drafts."""

    def around(self, executor: AnyExecutor, names_of: Callable[[StepPlan], dict[int, str]]) -> AnyExecutor:
        return _Timed(executor, self)

    def begun(self, plan: StepPlan) -> StepShape:
        self.drafts |= any(plan.num_drafts) or bool(plan.proposals)
        return self._shapes.read(plan)

    def stop(self, why: str) -> None:
        """Never called: the weights stay."""

    def close(self) -> None:
        """Do nothing: there is no file."""


class _Timed:
    def __init__(self, executor: AnyExecutor, timer: StepTimer) -> None:
        self._executor = executor
        self._timer = timer

    def forward(self, plan: StepPlan) -> _TimedStep:
        shape, began = self._timer.begun(plan), time.perf_counter()
        return _TimedStep(self._executor.forward(plan), self._timer, shape, began)

    def sample(self, step: LaunchedStep, payload: dict[str, Any]) -> None:
        assert isinstance(step, _TimedStep)
        self._executor.sample(step.inner, payload)

    def watch(self, spans: Spans) -> None:
        self._executor.watch(spans)


@dataclass(slots=True)
class _TimedStep:
    inner: LaunchedStep
    timer: StepTimer
    shape: StepShape
    began: float

    @property
    def plan(self) -> StepPlan:
        return self.inner.plan

    def result(self) -> StepOutput:
        output, timer = self.inner.result(), self.timer
        now = time.perf_counter()
        timer.steps.append(MeasuredStep(self.shape, now - max(self.began, timer.ended_at)))
        timer.ended_at = now
        return output


@dataclass(slots=True)
class Meter:
    """Drives an idle engine through loads of its own.

    Attributes:
        seconds: time for all rounds of single sizes together; larger sizes are left out when it is used up.
    """

    loop: EngineLoop
    limits: Limits
    num_tokens: int
    """That fit into the KV cache."""
    vocab_size: int
    timer: StepTimer
    ahead: bool
    """The device computes while the host plans; otherwise a step's time has that of its plan and commit."""
    seconds: float = 60.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    _count: int = 0

    def sizes(self, rounds: int, progress: Callable[[str], None]) -> list[MeasuredStep]:
        """Return the steps of loads that each have one size."""
        self.loop.record(self.timer)
        found: list[MeasuredStep] = []
        each = self.seconds / (3 * rounds)
        for number in range(rounds):
            progress(f"steps alone by size, round {number + 1} of {rounds}")
            for loads in (self._prompts(), self._decodes(), self._mixes()):
                until = time.perf_counter() + each
                for load in loads:
                    found += self._run(load)
                    if time.perf_counter() > until:
                        break
        return found

    def mixed(self) -> list[MeasuredStep]:
        """Return the steps of a load of requests of many lengths, which arrive while others run."""
        requests = [self._request(self._length(120), self._length(40)) for _ in range(_MIXED)]
        groups: list[list[GenerateRequest]] = []
        while requests:
            groups.append([requests.pop() for _ in range(min(len(requests), self.random.randint(1, 3)))])
        return self._run(groups, apart=4)

    def _prompts(self) -> Iterator[list[list[GenerateRequest]]]:
        """Prompts alone: one of each power of two up to the largest step, then one that takes several steps."""
        most = min(self.limits.max_num_batched_tokens, self.limits.max_model_len - 2, self.num_tokens // 2)
        for size in [*_powers(2, most), min(4 * most, self.limits.max_model_len - 2, self.num_tokens // 2)]:
            yield [[self._request(size, 1)]]

    def _decodes(self) -> Iterator[list[list[GenerateRequest]]]:
        """Rows of one token: each power of two of short contexts, and some of long ones."""
        long = max(_SHORT, min(_LONG, self.limits.max_model_len // 2))
        most = min(self.limits.max_num_seqs, self.num_tokens // (2 * (_SHORT + _STEPS)))
        for rows in _powers(1, most):
            yield [[self._request(_SHORT, _STEPS) for _ in range(rows)]]
            if rows in (1, 8) and rows * (long + _STEPS) < self.num_tokens // 2:
                yield [[self._request(long, _STEPS) for _ in range(rows)]]

    def _mixes(self) -> Iterator[list[list[GenerateRequest]]]:
        """Prompts that join rows of one token."""
        most = min(self.limits.max_num_seqs, self.num_tokens // 128)
        for rows in (4, 16, 64):
            for size in (8, 64, 256):
                if rows < most and size + rows <= self.limits.max_num_batched_tokens:
                    yield [[self._request(_SHORT, _STEPS) for _ in range(rows)], [self._request(size, 1)]]

    def _length(self, mean: int) -> int:
        drawn = self.random.lognormvariate(math.log(mean), 0.8)
        return max(2, min(round(drawn), self.limits.max_model_len // 3, 4 * mean))

    def _request(self, prompt: int, answer: int) -> GenerateRequest:
        self._count += 1
        tokens = [self.random.randrange(self.vocab_size) for _ in range(prompt)]
        params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
        return GenerateRequest(id=f"measure-{self._count}", tokens=tokens, params=params)

    def _run(self, groups: Sequence[Sequence[GenerateRequest]], apart: int = 3) -> list[MeasuredStep]:
        """Return the steps of a load of groups of requests that arrive some steps apart."""
        loop, timer, left, turn = self.loop, self.timer, list(groups), 0
        found: list[MeasuredStep] = []
        while left or loop.busy:
            if left and turn % apart == 0:
                for request in left.pop(0):
                    loop.add(request)
            turn += 1
            began = time.perf_counter()
            timer.steps.clear()
            for delta in loop.step():
                if delta.error is not None:
                    raise OctavoError(f"a request of the measurement failed: {delta.error}")
            took = time.perf_counter() - began
            if timer.drafts:
                raise ConfigError(
                    "This engine drafts tokens, and simulations have no drafts yet. Measure it without: --spec-method "
                    "none."
                )
            steps = timer.steps
            found += steps if self.ahead else [MeasuredStep(one.shape, took) for one in steps]
        return found


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield powers of two times `least` up to `most`, and `most`."""
    size = least
    while size < most:
        yield size
        size *= 2
    yield most
