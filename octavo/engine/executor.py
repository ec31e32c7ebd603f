"""Interfaces between an engine and its workers: `Executor` runs steps, `WorkerPort` does everything else.

Both are implemented in the engine's process (`octavo/worker/port.py`) and over worker processes (`multiproc.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar

from octavo.core.errors import DeviceLostError, EngineStateError, UnsupportedError
from octavo.core.futures import failed
from octavo.core.output import StepOutput
from octavo.core.pausing import SleepTag
from octavo.core.plan import StepPlan
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.engine.phases import PhaseTimer


class LaunchedStep(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...

    def result(self) -> StepOutput:
        """Wait for the step's output and return it. Raises the step's error."""
        ...


S = TypeVar("S", bound=LaunchedStep)


class Executor(Protocol[S]):
    """Runs steps strictly in launch order. `forward` and `sample` only enqueue work, on devices that support it."""

    def forward(self, plan: StepPlan) -> S: ...

    def sample(self, step: S, payload: dict[str, Any]) -> None: ...

    def watch(self, spans: Spans) -> None:
        """Record the parts of each step in a profile's spans."""
        ...


AnyExecutor = Executor[Any]
"""An executor with steps of its own kind: `sample` takes only steps that its `forward` returned."""


class Staged(Protocol):
    """Weights that are ready to replace those in use. Their memory is freed when the object is dropped."""

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        """Replace the weights in use. No step may be in flight.

        Args:
            version: the weights' name; None for a generated one.
            rescale: the KV cache holds nothing that is still needed, so its scales may change.
        """
        ...


class Tracer(Protocol):
    """Traces operations inside steps, such as torch's profiler."""

    def start(self) -> None: ...

    def stop(self, path: Path) -> None:
        """Stop, and write the trace to `path`; see `profile.py` for the format."""
        ...


class WorkerPort(Protocol):
    """All operations of workers except steps.

    Methods are called from the loop's thread while no step is in flight, except those that read weights, which may be
    called from any thread while steps run.
    """

    @property
    def weight_version(self) -> str:
        """The name of the weights in use."""
        ...

    @property
    def kv_form(self) -> str:
        """Name of the KV storage format, for display; known once there is an executor."""
        ...

    @property
    def can_sleep(self) -> bool:
        """Whether the engine was started in sleep mode, so that it can free memory."""
        ...

    def executor(self) -> AnyExecutor:
        """Return the executor. After a sleep it is a new one with an empty KV cache; drop the old one before.

        Raises:
            DeviceLostError: the device can't be used.
        """
        ...

    def check(self) -> None:
        """Raise DeviceLostError if a worker process has ended. Cheap; called while the engine is idle."""
        ...

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return the error to raise if the device can't compute any more after `error`, else None."""
        ...

    def check_weights(self) -> None:
        """Raise UnsupportedError if the weights can't be replaced."""
        ...

    def stage_weights(self, path: str | None, load_format: str | None) -> Staged:
        """Read weights in addition to those in use, by default from the files that were read last.

        Raises:
            InvalidRequestError: they can't replace those in use.
            EngineStateError: there is no memory for them.
        """
        ...

    def begin_weights(self) -> None:
        """Start an update by tensors; tensors of an unfinished update are dropped."""
        ...

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Read tensors from files: {"path": a safetensors file, or a folder of such files}.

        Raises:
            EngineStateError: `begin_weights` was not called.
            InvalidRequestError: they can't be read.
        """
        ...

    def take_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Add tensors of this process, by name.

        Raises:
            EngineStateError: `begin_weights` was not called.
            UnsupportedError: the model is in another process.
        """
        ...

    def stage_received(self) -> Staged:
        """Build weights from the received tensors.

        Raises:
            EngineStateError: `begin_weights` was not called.
            InvalidRequestError: tensors are missing, or are of another model.
        """
        ...

    def sleep(self, level: int) -> None:
        """Free the memory that this level, 1 or 2, frees, and the executor. Nothing else may hold the executor.

        On any error, which is raised, `wake_up` brings everything back, and `sleep` can be tried again.
        """
        ...

    def wake_up(self, part: SleepTag) -> None:
        """Allocate the memory of one part again. On any error, which is raised, the part stays asleep."""
        ...

    def tracer(self, settings: ProfileSettings) -> Tracer: ...

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function with each worker and these arguments; return the results.

        Raises:
            UnsupportedError: the workers are in other processes.
        """
        ...

    def call_hook(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        """Call `WorkerHook.call` of a feature in each rank, in order with its steps; does not wait.

        Returns:
            The ranks' results. It has the error of `core.errors` that the method raised, an EngineStateError while the
            worker sleeps, and a RuntimeError for other failures.

        Raises:
            DeviceLostError: a worker process has ended.
        """
        ...

    def close(self) -> None:
        """Free the device. No step may follow."""
        ...

    def abandon(self) -> None:
        """End the worker processes of a lost device. Makes no call to the device."""
        ...


class WorkerBuild(Protocol):
    """Builds a worker. Each method is called once, in this order, and may raise ConfigError or ModelFileError.

    Attributes:
        facts: known before weights are read.
    """

    facts: WorkerFacts

    def load(self, timer: PhaseTimer, max_drafts: int = 0) -> LoadedFacts:
        """Choose kernels and read the weights; report phases to `timer`. Rows have up to `max_drafts` drafts."""
        ...

    def allocate(self, sizes: CacheSizes) -> WorkerPort:
        """Allocate the memory of steps now, or at the latest in the first `WorkerPort.executor`."""
        ...

    def abandon(self) -> None:
        """End the worker processes that were started, if any."""
        ...


class FixedWorker:
    """The `WorkerPort` of an engine whose executor needs none: it can't sleep or change weights."""

    weight_version = "default"
    kv_form = ""
    can_sleep = False

    def executor(self) -> AnyExecutor:
        raise AssertionError("this engine's executor is never replaced")

    def check(self) -> None:
        """Do nothing: there are no worker processes."""

    def loss(self, error: Exception) -> DeviceLostError | None:
        return None

    def check_weights(self) -> None:
        raise UnsupportedError("The weights of this model can't be replaced while it is served; restart the engine.")

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

    def wake_up(self, part: SleepTag) -> None:
        raise AssertionError("`can_sleep` refuses this")

    def tracer(self, settings: ProfileSettings) -> Tracer:
        raise EngineStateError("This engine has no worker to trace.")

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        raise UnsupportedError("This engine has no worker to call.")

    def call_hook(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        return failed(UnsupportedError("This engine has no worker to call."))

    def close(self) -> None:
        """Do nothing: no device is held."""

    def abandon(self) -> None:
        """Do nothing: there are no worker processes."""
