"""Workers in separate processes: `RankProcess`, and the engine's proxies `RankWorker` and `RankExecutor`.

Encoded plans are sent and encoded outputs received. No tensor passes between an engine and a rank.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from octavo.core.errors import DeviceLostError, UnsupportedError
from octavo.core.futures import mapped
from octavo.core.output import StepOutput
from octavo.core.pausing import SleepTag
from octavo.core.plan import StepPlan
from octavo.core.profiling import ProfileSettings
from octavo.core.spans import Spans
from octavo.core.worker_info import CacheSizes, LoadedFacts, WorkerFacts
from octavo.engine import rank_wire as wire
from octavo.engine.failure import Failure
from octavo.engine.frames import Frames, frame
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.process import die_with_parent

log = logging.getLogger(__name__)

_PIECE = 1 << 20
_GRACE_S = 5.0
_LOG_LINES = 20

T = TypeVar("T")


class RankError(RuntimeError):
    """A step or call failed in a rank; the rank's log has the traceback."""


class RankProcess:
    """A child that runs `python -m MODULE`, reads (socket, `payload`) from its standard input, and serves a rank.

    Its standard error is forwarded, and the last lines are kept for the error if it ends.

    Attributes:
        number: the rank's number.
        device: its device's name; "" until it is known.
    """

    def __init__(self, module: str, payload: Any, number: int = 0) -> None:
        self.number = number
        self.device = ""
        self._peer, child = socket.socketpair()
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(child.fileno(),),
            )
            assert self._process.stdin is not None
            assert self._process.stderr is not None
            with self._process.stdin as stdin:
                pickle.dump((child.fileno(), payload), stdin)
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[msgspec.Raw]] = {}
        self._outputs: queue.SimpleQueue[wire.RankOutput | wire.StepFailed | None] = queue.SimpleQueue()
        self._lost: DeviceLostError | None = None
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._relay = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
        self._relay.start()
        self._listener = threading.Thread(target=self._listen, name=f"octavo-rank-{number}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raise DeviceLostError if the process has ended or its device is lost."""
        if self._lost is not None:
            raise self._lost

    def send(self, message: wire.ToRank) -> None:
        """Send a message. Raise DeviceLostError if the process has ended."""
        self.check()
        try:
            with self._sending:
                self._peer.sendall(frame(wire.encode(message)))
        except OSError:
            raise self._lose("its process closed its socket") from None

    def fetch(self, step: int) -> StepOutput:
        """Wait for a step's output.

        Raises:
            RankError: the step failed.
            DeviceLostError: the process has ended or its device is lost.
        """
        self.send(wire.FetchOutput(step))
        while True:
            found = self._outputs.get()
            if found is None:
                self._outputs.put(None)
                self.check()
                raise AssertionError("a rank ended without a reason")
            if found.step != step:  # an earlier step, whose result was given up
                continue
            if isinstance(found, wire.RankOutput):
                return found.output
            raise self._error(found.failure, found.lost)

    def call(self, kind: type[T], method: str, *args: Any) -> T:
        """Call a method of `rank.py` and return its result.

        Args:
            kind: type of the result.
            args: values of built-in types.

        Raises:
            OctavoError: the method raised this error of `core.errors`.
            RankError: it failed otherwise.
            DeviceLostError: the process has ended or its device is lost.
        """
        answer = self.post(method, *args)
        return msgspec.msgpack.decode(answer.result(), type=kind)

    def post(self, method: str, *args: Any) -> Future[msgspec.Raw]:
        """`call` without waiting; the future's result is encoded."""
        number = next(self._numbers)
        answer: Future[msgspec.Raw] = Future()
        self._calls[number] = answer
        self.send(wire.CallMethod(number, method, list(args)))
        self.check()  # the process may have ended since, and would never answer
        return answer

    def close(self) -> None:
        """Close the socket, which ends the process; kill it if it does not end in time."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d did not end within %.0f s and is killed", self.number, _GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process if it has not ended, and wait for its end."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._listener.join(_GRACE_S)
        self._relay.join(_GRACE_S)
        self._peer.close()

    def _listen(self) -> None:
        """Deliver the rank's messages to their receivers until it ends."""
        frames = Frames()
        try:
            while data := self._peer.recv(_PIECE):
                for message in frames.take(data):
                    self._take(wire.decode_from_rank(message))
        except OSError:
            log.debug("the socket of rank %d was closed", self.number)
        if self._lost is None:
            self._lose(self._end())
        self._outputs.put(None)
        for answer in list(self._calls.values()):
            if not answer.done():
                answer.set_exception(self._lost or AssertionError("unreachable"))

    def _take(self, message: wire.FromRank) -> None:
        if not isinstance(message, wire.RankReply):
            self._outputs.put(message)
            return
        answer = self._calls.pop(message.number)
        if message.failure is None:
            answer.set_result(message.value)
        else:
            answer.set_exception(self._error(message.failure, message.lost))

    def _error(self, failure: Failure, lost: str | None) -> Exception:
        if lost is not None:
            return self._lose(lost)
        return failure.known() or RankError(f"rank {self.number}: {failure.message}")

    def _end(self) -> str:
        """Wait for the process's end and return how it ended."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "its process closed its socket"
        self._relay.join(_GRACE_S)
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"

    def _lose(self, reason: str) -> DeviceLostError:
        """Record that the rank is lost, with its last log lines, and return the error. The first reason is kept."""
        if self._lost is None:
            where = f"rank {self.number}" + (f" ({self.device})" if self.device else "")
            self._lost = DeviceLostError(where, reason, tuple(self._lines))
        return self._lost

    def _pass_on(self, source: IO[bytes]) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                sys.stderr.write(text)
                sys.stderr.flush()


@dataclass(slots=True)
class RankStep:
    """A step sent to a rank."""

    plan: StepPlan
    rank: RankProcess

    def result(self) -> StepOutput:
        return self.rank.fetch(self.plan.id)


class RankExecutor:
    """An `Executor` over a rank. Errors of a step are raised by `RankStep.result`."""

    def __init__(self, rank: RankProcess, codec: PlanCodec) -> None:
        self._rank = rank
        self._codec = codec

    def forward(self, plan: StepPlan) -> RankStep:
        self._rank.send(wire.LaunchStep(plan.id, self._codec.encode_plan(plan)))
        return RankStep(plan, self._rank)

    def sample(self, step: RankStep, payload: dict[str, Any]) -> None:
        self._rank.send(wire.SampleStep(step.plan.id, self._codec.encode_payload(payload)))

    def watch(self, spans: Spans) -> None:
        """Do nothing: the steps run in another process, which the trace covers."""


class RankBuild:
    """A `WorkerBuild` whose worker is in a rank."""

    def __init__(self, rank: RankProcess, codec: PlanCodec) -> None:
        self._rank = rank
        self._codec = codec
        self.facts = rank.call(WorkerFacts, "begin")
        rank.device = self.facts.device

    def load(self, timer: PhaseTimer, max_drafts: int = 0) -> LoadedFacts:
        timer.begin("weights")
        loaded = self._rank.call(LoadedFacts, "load", max_drafts)
        timer.begin("kv cache")
        return loaded

    def allocate(self, sizes: CacheSizes) -> RankWorker:
        can_sleep = self._rank.call(bool, "allocate", msgspec.to_builtins(sizes))
        return RankWorker(self._rank, self._codec, can_sleep=can_sleep)

    def abandon(self) -> None:
        self._rank.kill()


class RankWorker:
    """A `WorkerPort` over a rank."""

    def __init__(self, rank: RankProcess, codec: PlanCodec, *, can_sleep: bool) -> None:
        self.can_sleep = can_sleep
        self.weight_version = "default"
        self.kv_form = ""
        self._rank = rank
        self._codec = codec

    def executor(self) -> RankExecutor:
        self.weight_version, self.kv_form = self._rank.call(tuple[str, str], "executor")
        return RankExecutor(self._rank, self._codec)

    def check(self) -> None:
        self._rank.check()

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return None: calls to a lost rank raise DeviceLostError themselves."""
        return None

    def check_weights(self) -> None:
        self._rank.call(type(None), "check_weights")

    def stage_weights(self, path: str | None, load_format: str | None) -> RankStaged:
        return RankStaged(self, self._rank.call(int, "stage_weights", path, load_format))

    def begin_weights(self) -> None:
        self._rank.call(type(None), "begin_weights")

    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        self._rank.call(type(None), "receive_weights", dict(update_info))

    def take_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        raise UnsupportedError(
            "The model is in a separate process (--distributed-executor-backend mp), which can't use tensors of this "
            'process: send {"path": FILE}. A file in /dev/shm stays in memory.'
        )

    def stage_received(self) -> RankStaged:
        return RankStaged(self, self._rank.call(int, "stage_received"))

    def put_in_place(self, number: int, version: str | None, *, rescale: bool) -> None:
        self.weight_version = self._rank.call(str, "put_in_place", number, version, rescale)

    def drop(self, number: int) -> None:
        """Drop staged weights, without waiting. Does nothing if the rank has ended."""
        with contextlib.suppress(DeviceLostError):
            self._rank.post("drop_weights", number)

    def sleep(self, level: int) -> None:
        self._rank.call(type(None), "sleep", level)

    def wake_up(self, part: SleepTag) -> None:
        self._rank.call(type(None), "wake_up", str(part))

    def tracer(self, settings: ProfileSettings) -> RankTracer:
        return RankTracer(self._rank, settings)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        raise UnsupportedError(
            "The model is in a separate process (--distributed-executor-backend mp), which can't call functions of "
            "this one; leave that setting out."
        )

    def call_hook(self, feature: str, method: str, args: Mapping[str, Any]) -> Future[list[Any]]:
        answer = self._rank.post("call_hook", feature, method, dict(args))
        return mapped(answer, lambda found: msgspec.msgpack.decode(found, type=list[Any]))

    def abandon(self) -> None:
        self._rank.kill()

    def close(self) -> None:
        self._rank.call(type(None), "close")
        self._rank.close()


class RankStaged:
    """Weights that a rank has staged."""

    def __init__(self, worker: RankWorker, number: int) -> None:
        self._worker = worker
        self._number = number

    def put_in_place(self, version: str | None, *, rescale: bool) -> None:
        self._worker.put_in_place(self._number, version, rescale=rescale)

    def __del__(self) -> None:
        self._worker.drop(self._number)


class RankTracer:
    """A `Tracer` of a rank. The rank writes the file; both processes are on one machine."""

    def __init__(self, rank: RankProcess, settings: ProfileSettings) -> None:
        self._rank = rank
        self._settings = settings

    def start(self) -> None:
        self._rank.call(type(None), "start_trace", msgspec.to_builtins(self._settings))

    def stop(self, path: Path) -> None:
        self._rank.call(type(None), "stop_trace", str(path))


def receive_rank() -> tuple[socket.socket, Any]:
    """Call in the child: return the socket to the engine and the payload of `RankProcess`.

    Also makes the child ignore SIGINT and SIGTERM, and end with its parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # service managers signal all processes; the engine decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    descriptor, payload = pickle.load(sys.stdin.buffer)
    sys.stdin.close()
    sys.stdin = open(os.devnull)  # noqa: SIM115
    return socket.socket(fileno=descriptor), payload
