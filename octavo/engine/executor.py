"""`Executor`: what the loop needs of whatever runs the model, and of what else stands behind it: weights, sleep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from octavo.core.output import StepOutput
from octavo.core.pausing import Part
from octavo.core.plan import StepPlan
from octavo.core.spans import Spans


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

    def watch(self, spans: Spans) -> None:
        """Have a profile see the parts of a step."""
        ...

    def close(self) -> None:
        """Free the device; no step may follow."""
        ...


class Staged(Protocol):
    """Weights that are ready to take the place of those in use."""

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        """Nothing is being computed.

        Args:
            version: what they are called from now on; None for a name of its own.
            rescale: nothing in the KV cache is needed any more, so its scales may change.
        """
        ...


class Weights(Protocol):
    """Other weights for the model behind an executor."""

    @property
    def version(self) -> str:
        """What the weights in use are called."""
        ...

    def stage(self, path: str | None, load_format: str | None) -> Staged:
        """Read weights beside those in use, by default the ones that were read last. Any thread may call it.

        Raises:
            InvalidRequestError: they can't take the place of those in use.
            EngineStateError: there is no memory for them.
        """
        ...

    def begin(self) -> None:
        """Wait for tensors; those of an update that was not finished are dropped."""
        ...

    def receive(self, update_info: Mapping[str, Any]) -> None:
        """Read some of them from where they are said to be.

        Raises:
            EngineStateError: nobody has begun.
            InvalidRequestError: they can't be read.
        """
        ...

    def take(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """`receive` for tensors of this process, by name."""
        ...

    def stage_received(self) -> Staged:
        """Make weights of what came.

        Raises:
            EngineStateError: nobody has begun.
            InvalidRequestError: it is not all of the model, or not of this model.
        """
        ...


class Sleeper(Protocol):
    """Gives the memory behind an executor back while nothing runs, and takes it again."""

    def sleep(self, level: int) -> None:
        """Give back what sleeps at this level, 1 or 2. The executor was closed, and nothing else holds on to it."""
        ...

    def wake_up(self, part: Part) -> None:
        """Take the memory of one part again. Raises what goes wrong; the part sleeps on then."""
        ...

    def executor(self) -> Executor:
        """A new one, with an empty KV cache; weights must be there."""
        ...
