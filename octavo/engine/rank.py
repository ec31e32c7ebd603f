"""`RankServer`: a worker in a separate process, driven by the messages of `rank_wire.py`."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from octavo.core.errors import DeviceLostError, EngineStateError, OctavoError
from octavo.core.futures import done
from octavo.core.memory import memory_errors
from octavo.core.pausing import SleepTag
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes
from octavo.engine import rank_wire as wire
from octavo.engine.executor import AnyExecutor, LaunchedStep, Staged, Tracer, WorkerBuild, WorkerPort
from octavo.engine.failure import Failure
from octavo.engine.frames import Frames, frame
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.process import keep_freed_memory, switch_threads_often
from octavo.engine.profile import merge
from octavo.engine.ring import RingReader

log = logging.getLogger(__name__)


class RankServer:
    """Serves until the engine closes its end of the socket.

    Args:
        peer: the socket for answers to the engine.
        ring: brings the engine's messages.
        make_build: starts to build the worker. It may raise the errors of `WorkerBuild`.
        codec: decodes plans and the features' payloads.
        answers: whether it sends the steps' outputs; the other ranks report failures and transfers.
    """

    def __init__(
        self,
        peer: socket.socket,
        ring: RingReader,
        make_build: Callable[[], WorkerBuild],
        codec: PlanCodec,
        *,
        answers: bool = True,
    ) -> None:
        self._peer = peer
        self._ring = ring
        self._codec = codec
        self._answers = answers
        self._fetched = -1
        self._last_failed: int | None = None
        self._sending = Lock()
        self._steps: dict[int, LaunchedStep] = {}
        self._failed: dict[int, Exception] = {}
        self._methods = _RankMethods(make_build, traces=answers)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="octavo-weights")

    def run(self) -> int:
        """Serve; return the process's exit code, 1 if the device was lost, which was reported to the engine."""
        try:
            for message in self._messages():
                self._take(wire.decode_to_rank(message))
        except DeviceLostError:
            return 1
        except ConnectionError:
            log.warning("the engine has disconnected")
        finally:
            self._reading.shutdown(wait=False, cancel_futures=True)
        return 0

    def _messages(self) -> Iterator[bytes]:
        """Yield the engine's messages until it closes its end of the socket."""
        frames, arrivals = Frames(), select.poll()
        arrivals.register(self._ring.descriptor, select.POLLIN)
        arrivals.register(self._peer, select.POLLIN | select.POLLHUP)
        while True:
            ready = {descriptor for descriptor, _ in arrivals.poll()}
            if self._ring.descriptor in ready:
                for data in self._ring.take():
                    yield from frames.take(data)
            elif not self._peer.recv(1):
                return

    def _take(self, message: wire.ToRank) -> None:
        match message:
            case wire.LaunchStep(number, plan):
                self._launch(number, lambda: self._forward(number, plan))
            case wire.SampleStep(number, payload) if number in self._steps:
                self._launch(number, lambda: self._sample(number, payload))
                if self._answers and self._methods.is_synchronous:
                    self._fetch(number)
            case wire.FetchOutput(number) if number > self._fetched:
                self._fetch(number)
            case wire.CallMethod(number, "failed", [step]):
                self._reply(number, done(self._last_failed == step))
            case wire.CallMethod(method=name) if name in _BESIDE_STEPS:
                self._reading.submit(self._answer, message)
            case wire.CallMethod(number, "call_hook", [feature, method, args]):
                result = self._methods.call_hook(feature, method, args)
                result.add_done_callback(lambda ended: self._reply(number, ended))
            case wire.CallMethod():
                self._answer(message)

    def _launch(self, number: int, work: Callable[[], None]) -> None:
        """Run part of a step. Errors are reported when the step's output is fetched."""
        try:
            work()
        except Exception as error:  # of any kind; the rank goes on
            log.exception("step %d failed", number)
            self._failed[number] = error

    def _forward(self, number: int, plan: bytes) -> None:
        self._steps[number] = self._methods.running.forward(self._codec.decode_plan(plan))

    def _sample(self, number: int, payload: bytes) -> None:
        if number not in self._failed:
            self._methods.running.sample(self._steps[number], self._codec.decode_payload(payload))

    def _fetch(self, number: int) -> None:
        self._fetched = number
        error = self._failed.get(number)
        step = self._steps.get(number)
        if error is None and step is not None:
            try:
                output = step.result()
            except Exception as exc:
                log.exception("step %d failed", number)
                error = exc
        self._steps = {later: one for later, one in self._steps.items() if later > number}
        self._failed = {later: one for later, one in self._failed.items() if later > number}
        if error is not None:
            self._last_failed = number
            lost = self._methods.loss(error)
            self._send(wire.StepFailed(number, Failure.of(error), lost))
            _end_if(lost)
        elif self._answers:
            self._send(wire.RankOutput(number, output))
        elif step is not None and output.moved:
            self._send(wire.RankMoved(output.moved))

    def _answer(self, call: wire.CallMethod) -> None:
        try:
            value = getattr(self._methods, call.method)(*call.args)
            self._send(wire.RankReply(call.number, msgspec.Raw(msgspec.msgpack.encode(value))))
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("%s failed", call.method)
            lost = self._methods.loss(error)
            self._send(wire.RankReply(call.number, msgspec.Raw(b"\xc0"), Failure.of(error), lost))
            _end_if(lost)

    def _reply(self, number: int, ended: Future[Any]) -> None:
        """Send the result of a call that was not waited for."""
        error = ended.exception()
        if isinstance(error, Exception):
            if not isinstance(error, OctavoError):
                log.error("a feature's call failed", exc_info=error)
            self._send(wire.RankReply(number, msgspec.Raw(b"\xc0"), Failure.of(error)))
        else:
            self._send(wire.RankReply(number, msgspec.Raw(msgspec.msgpack.encode(ended.result()))))

    def _send(self, message: wire.FromRank) -> None:
        with self._sending:
            self._peer.sendall(frame(wire.encode(message)))


def _end_if(lost: str | None) -> None:
    if lost is not None:
        raise DeviceLostError("this rank", lost)


def _log_phase(name: str, seconds: float | None) -> None:
    if seconds is not None:
        log.info("start: %s %.1f s", name, seconds)


_BESIDE_STEPS = ("stage_weights", "receive_weights", "stage_received")


class _RankMethods:
    """Methods for the engine's calls, with arguments and results of built-in types. Staged weights are numbered."""

    def __init__(self, make_build: Callable[[], WorkerBuild], *, traces: bool) -> None:
        self._make_build = make_build
        self._traces = traces
        self._build: WorkerBuild | None = None
        self._port: WorkerPort | None = None
        self._executor: AnyExecutor | None = None
        self._tracer: Tracer | None = None
        self._spans = Spans()
        self._staged: dict[int, Staged] = {}
        self._timer = PhaseTimer(_log_phase)

    @property
    def running(self) -> AnyExecutor:
        assert self._executor is not None, "a step was sent to a rank without an executor"
        return self._executor

    @property
    def is_synchronous(self) -> bool:
        """Whether steps are computed when they are launched. Their results are then sent at once: those of later steps,
        which may wait for other stages of a pipeline, must not delay them."""
        return self._build is not None and self._build.facts.default_depth == 0

    def loss(self, error: Exception) -> str | None:
        """Return why the device is lost after this error; None if it is not."""
        if self._port is None:
            return None
        lost = error if isinstance(error, DeviceLostError) else self._port.loss(error)
        return None if lost is None else lost.reason

    def begin(self) -> Any:
        self._timer.begin("setup")
        with memory_errors():
            self._build = self._make_build()
        self._timer.end()
        return self._build.facts

    def load(self, max_drafts: int) -> Any:
        assert self._build is not None
        with memory_errors():
            return self._build.load(self._timer, max_drafts)

    def allocate(self, sizes: dict[str, int]) -> bool:
        """Return whether the worker can sleep."""
        assert self._build is not None
        self._port = self._build.allocate(msgspec.convert(sizes, CacheSizes))
        return self._port.can_sleep

    def executor(self) -> tuple[str, str]:
        """Make the executor; return the names of the weights and of the KV cache's storage format."""
        port = self._there()
        with memory_errors():
            self._executor = port.executor()
        self._timer.end()
        keep_freed_memory()
        switch_threads_often()
        return port.weight_version, port.kv_form

    def check_weights(self) -> None:
        self._there().check_weights()

    def stage_weights(self, number: int, path: str | None, load_format: str | None) -> None:
        self._staged[number] = self._there().stage_weights(path, load_format)

    def begin_weights(self) -> None:
        self._there().begin_weights()

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        self._there().receive_weights(update_info)

    def stage_received(self, number: int) -> None:
        self._staged[number] = self._there().stage_received()

    def put_in_place(self, number: int, version: str | None, rescale: bool) -> str:
        """Replace the weights; return the name of the new ones."""
        self._staged.pop(number).put_in_place(version, rescale=rescale)
        return self._there().weight_version

    def drop_weights(self, number: int) -> None:
        self._staged.pop(number, None)

    def sleep(self, level: int) -> None:
        self._executor = None
        self._there().sleep(level)

    def wake_up(self, part: str) -> None:
        self._there().wake_up(SleepTag(part))

    def start_trace(self, settings: dict[str, Any]) -> None:
        if not self._traces:
            return
        given = msgspec.convert(settings, ProfileSettings, dec_hook=lambda kind, value: kind(value))  # a path is a text
        if not given.folder.is_dir():  # the engine has made it
            raise EngineStateError(
                f"torch_profiler_dir: the rank that samples is on a machine without the folder {given.folder}. Name "
                "one that the machines share."
            )
        self._tracer = self._there().tracer(given)
        self._tracer.start()
        self._spans = Spans()
        if self._executor is not None:
            self._executor.watch(self._spans)

    def stop_trace(self, path: str) -> None:
        """Write the trace to a path, with the spans of the executor."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            return
        self._spans.release()
        whole = Path(path)
        seen = whole.with_suffix(".seen")
        tracer.stop(seen)
        with seen.open(encoding="utf-8") as source, whole.open("w", encoding="utf-8") as out:
            merge(source, self._spans, out)
        seen.unlink()

    def call_hook(self, feature: str, method: str, args: dict[str, Any]) -> Future[list[Any]]:
        return self._there().call_hook(feature, method, args)

    def close(self) -> None:
        with contextlib.suppress(OctavoError):
            self._there().close()

    def _there(self) -> WorkerPort:
        assert self._port is not None, "the rank has allocated nothing yet"
        return self._port
