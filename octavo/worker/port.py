"""`LocalWorker`: the `WorkerPort` of a worker in the engine's process. Its executor is the runner itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from octavo.core.errors import DeviceLostError, EngineStateError, UnsupportedError
from octavo.core.futures import failed
from octavo.core.pausing import SleepTag
from octavo.core.profiling import ProfileSettings
from octavo.worker.encoder.worker import EncoderWorker
from octavo.worker.runner import Runner
from octavo.worker.sleep import WorkerSleep
from octavo.worker.tracing import TorchTracer
from octavo.worker.weights import StagedWeights, WorkerWeights
from octavo.worker.worker import Worker


class LocalWorker:
    """A `WorkerPort` over a worker in this process.

    Args:
        make_runner: makes a runner for the worker's model, with an empty KV cache.
        can_sleep: the engine was started in sleep mode.
        keeps_copies: see `WorkerSleep`.
    """

    def __init__(
        self,
        worker: Worker | EncoderWorker,
        make_runner: Callable[[], Runner],
        *,
        can_sleep: bool = False,
        keeps_copies: bool = False,
    ) -> None:
        self._worker = worker
        self._make_runner = make_runner
        self._runner: Runner | None = None
        self._weights = WorkerWeights(worker) if isinstance(worker, Worker) else None
        self._sleep = (
            WorkerSleep(worker, keeps_copies=keeps_copies) if can_sleep and isinstance(worker, Worker) else None
        )

    @property
    def weight_version(self) -> str:
        return "default" if self._weights is None else self._weights.version

    @property
    def kv_form(self) -> str:
        return self._worker.kv_form if isinstance(self._worker, Worker) else ""

    @property
    def can_sleep(self) -> bool:
        return self._sleep is not None

    def executor(self) -> Runner:
        if self._runner is None:
            self._runner = self._make_runner()
        return self._runner

    def check(self) -> None:
        """Do nothing: the worker is in this process."""

    def loss(self, error: Exception) -> DeviceLostError | None:
        return self._worker.device.loss(error)

    def check_weights(self) -> None:
        self._replaceable()

    def stage_weights(self, path: str | None, load_format: str | None) -> StagedWeights:
        return self._replaceable().stage(path, load_format)

    def begin_weights(self) -> None:
        self._replaceable().begin()

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        self._replaceable().receive(update_info)

    def take_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._replaceable().take(tensors)

    def stage_received(self) -> StagedWeights:
        return self._replaceable().stage_received()

    def _replaceable(self) -> WorkerWeights:
        if self._weights is None:
            raise UnsupportedError(
                "The weights of this model can't be replaced while it is served; restart the engine."
            )
        return self._weights

    def sleep(self, level: int) -> None:
        self.close()
        if self._sleep is not None:
            self._sleep.sleep(level)

    def wake_up(self, part: SleepTag) -> None:
        if self._sleep is not None:
            self._sleep.wake_up(part)

    def tracer(self, settings: ProfileSettings) -> TorchTracer:
        return TorchTracer(self._worker.device.torch_device, settings)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call the function with the `Worker`, or the `EncoderWorker`."""
        return [function(self._worker, *args, **kwargs)]

    def call_hook(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        if self._runner is None:
            return failed(EngineStateError("The engine sleeps; wake it up first."))
        try:
            return self._runner.hooks.call(feature, method, args)
        except Exception as error:  # the caller's, as if it had come later
            return failed(error)

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def abandon(self) -> None:
        """Do nothing: the memory is freed at the end of this process."""
