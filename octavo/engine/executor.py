"""`Executor`: what the loop needs of whatever runs the model; `InlineExecutor` runs it in this thread."""

from __future__ import annotations

from typing import Any, Protocol

from octavo.core.output import StepOutput
from octavo.core.plan import StepPlan


class Step(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    def result(self) -> StepOutput:
        """Wait for the step's tokens. Raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs steps strictly in the order of their launch. `forward` and `sample` only enqueue, where the device can."""

    def forward(self, plan: StepPlan) -> Step: ...

    def sample(self, step: Step, payload: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Free the device; no step may follow."""
        ...
