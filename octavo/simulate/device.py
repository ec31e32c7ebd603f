"""`SimulatedDevice`: an executor that computes nothing and moves a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans
from octavo.simulate.answers import Answer
from octavo.simulate.shape import ShapeReader, StepShape

StepSeconds = Callable[[StepShape], float]


@dataclass(slots=True)
class Clock:
    """The time of a simulation, in seconds from its start."""

    now: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    plan: StepPlan
    tokens: list[list[int]]
    ends: float
    clock: Clock

    def result(self) -> StepOutput:
        """Wait for the step: it is its end, if that was not before."""
        self.clock.now = max(self.clock.now, self.ends)
        return StepOutput(self.tokens)


class SimulatedDevice:
    """Runs steps one after the other, each as long as the model says.

    Args:
        seconds: returns how long a step of a shape takes.
        answers: request id -> what it generates.
        names_of: returns slot -> request id and choice of the requests that take slots with a launched plan.
    """

    def __init__(
        self,
        clock: Clock,
        seconds: StepSeconds,
        shapes: ShapeReader,
        answers: Mapping[str, Answer],
        names_of: Callable[[StepPlan], dict[int, str]],
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._shapes = shapes
        self._answers = answers
        self._names_of = names_of
        self._free_at = 0.0
        self._slots: dict[int, Answer] = {}
        self.num_steps = 0
        self.busy_s = 0.0

    def forward(self, plan: StepPlan) -> SimulatedStep:
        if plan.new:
            self._slots |= {slot: self._answers[_id(name)] for slot, name in self._names_of(plan).items()}
        seconds = self._seconds(self._shapes.read(plan))
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self.num_steps += 1
        self.busy_s += seconds
        ends, slots = self._shapes.ends, self._slots
        tokens = [
            [slots[slot].token(ends[slot])] if samples else []
            for slot, samples in zip(plan.slots, plan.samples, strict=True)
        ]
        return SimulatedStep(plan, tokens, self._free_at, self._clock)

    def sample(self, step: SimulatedStep, payload: dict[str, Any]) -> None:
        """Do nothing: the step's tokens are those of the trace."""

    def watch(self, spans: Spans) -> None:
        """Do nothing: the steps have no parts to record."""


def _id(name: str) -> str:
    return name.rpartition("/")[0]
