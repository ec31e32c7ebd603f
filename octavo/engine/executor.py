"""What an engine asks of what computes: `Executor` runs steps, `WorkerPort` is for everything else.

Both have a form in the engine's process (`octavo/worker/port.py`) and one over processes of their own (`multiproc.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from octavo.core.errors import DeviceLostError, EngineStateError, UnsupportedError
from octavo.core.output import StepOutput
from octavo.core.pausing import Part
from octavo.core.plan import StepPlan
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.engine.phases import PhaseTimer


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


class Staged(Protocol):
    """Weights that are ready to take the place of those in use. Dropped, they give their memory back."""

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        """Compute with them from now on. No step is in flight.

        Args:
            version: their name from now on; None for one that is made up.
            rescale: nothing in the KV cache is needed any more, so its scales may change.
        """
        ...


class Tracer(Protocol):
    """What looks deeper than the loop, such as torch's profiler."""

    def start(self) -> None: ...

    def stop(self, path: Path) -> None:
        """End, and write what was seen to `path`; see `profile.py` for the format."""
        ...


class WorkerPort(Protocol):
    """All that an engine asks of its workers besides steps.

    Methods are called from the loop's thread while no step is in flight, but for those that read weights, which any
    thread may call while steps run.
    """

    @property
    def weight_version(self) -> str:
        """The name of the weights in use."""
        ...

    @property
    def kv_form(self) -> str:
        """Name of the KV storage format, for people; known once there is an executor."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether the engine was started for giving memory back."""
        ...

    def executor(self) -> Executor:
        """Return what runs steps. After a sleep it is a new one with an empty KV cache; the old one must not be held.

        Raises:
            DeviceLostError: the device can't be used.
        """
        ...

    def check(self) -> None:
        """Raise DeviceLostError if a process that computes is gone. Costs little; called while the engine is idle."""
        ...

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return what to raise if the device can't compute any more after `error`, else None."""
        ...

    def check_weights(self) -> None:
        """Raise UnsupportedError if the weights can't be replaced."""
        ...

    def stage_weights(self, path: str | None, load_format: str | None) -> Staged:
        """Read weights beside those in use, by default from the files that were read last.

        Raises:
            InvalidRequestError: they can't take the place of those in use.
            EngineStateError: there is no memory for them.
        """
        ...

    def begin_weights(self) -> None:
        """Expect tensors; those of an update that was not finished are dropped."""
        ...

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Read some of the tensors: {"path": a safetensors file, or a folder with some}.

        Raises:
            EngineStateError: `begin_weights` was not called.
            InvalidRequestError: they can't be read.
        """
        ...

    def take_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take tensors of this process, by name.

        Raises:
            EngineStateError: `begin_weights` was not called.
            UnsupportedError: the model is in another process.
        """
        ...

    def stage_received(self) -> Staged:
        """Make weights of the tensors that came.

        Raises:
            EngineStateError: `begin_weights` was not called.
            InvalidRequestError: they are not all of the model, or not of this model.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give back what sleeps at this level, 1 or 2; the executor goes. Nothing else may hold it."""
        ...

    def wake_up(self, part: Part) -> None:
        """Take the memory of one part again. Raises what goes wrong; the part sleeps on then."""
        ...

    def tracer(self, settings: ProfileSettings) -> Tracer: ...

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with each worker and these arguments; return the results.

        Raises:
            UnsupportedError: the workers are in other processes.
        """
        ...

    def close(self) -> None:
        """Free the device; no step may follow."""
        ...

    def abandon(self) -> None:
        """End what is left where the device is lost: its processes. Nothing that is called on the device."""
        ...


class WorkerBuild(Protocol):
    """What computes, in the making; the methods are called once, in their order. All may raise ConfigError or
    ModelFileError.

    Attributes:
        facts: what is known before weights are read.
    """

    facts: WorkerFacts

    def load(self, timer: PhaseTimer) -> LoadedFacts:
        """Choose kernels and read the weights; `timer` gets the phases."""
        ...

    def allocate(self, sizes: CacheSizes) -> WorkerPort:
        """Allocate what steps need, at the latest with the first `WorkerPort.executor`."""
        ...

    def abandon(self) -> None:
        """End the processes that were started, if any."""
        ...


class FixedWorker:
    """A `WorkerPort` beside an executor that needs none: it neither sleeps nor takes other weights."""

    weight_version = "default"
    kv_form = ""
    can_sleep = False

    def executor(self) -> Executor:
        raise AssertionError("this engine's executor stays as it is")

    def check(self) -> None:
        """It has no processes."""

    def loss(self, error: Exception) -> DeviceLostError | None:
        return None

    def check_weights(self) -> None:
        raise UnsupportedError("The weights of this model can't be replaced while it is served; start it anew.")

    def stage_weights(self, path: str | None, load_format: str | None) -> Staged:
        raise AssertionError("`check_weights` refuses this")

    def begin_weights(self) -> None:
        raise AssertionError("`check_weights` refuses this")

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        raise AssertionError("`check_weights` refuses this")

    def take_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        raise AssertionError("`check_weights` refuses this")

    def stage_received(self) -> Staged:
        raise AssertionError("`check_weights` refuses this")

    def sleep(self, level: int) -> None:
        raise AssertionError("`can_sleep` refuses this")

    def wake_up(self, part: Part) -> None:
        raise AssertionError("`can_sleep` refuses this")

    def tracer(self, settings: ProfileSettings) -> Tracer:
        raise EngineStateError("There is nothing to trace.")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        raise UnsupportedError("This engine has no worker that could be called.")

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """It has no processes."""
