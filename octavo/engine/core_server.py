"""`CoreServer`: serve an engine loop over a socket, in its own process. Its clients are `CoreClient`s."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import msgspec

from octavo.core.errors import DeviceLostError, EngineStateError, InvalidRequestError, OctavoError, internal_error
from octavo.core.garbage import Garbage
from octavo.core.info import ModelInfo
from octavo.core.output import TokenDelta, failed
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest, answers_to
from octavo.core.stats import EngineStats
from octavo.engine import wire
from octavo.engine.connections import Connection, Connections
from octavo.engine.executor import Staged, WorkerPort
from octavo.engine.failure import Failure
from octavo.engine.phases import OnPhase
from octavo.engine.updates import Update, Updates, WeightUpdate

log = logging.getLogger(__name__)


class Loop(Protocol):
    """The served loop: an `EngineLoop`, or a substitute in tests."""

    @property
    def busy(self) -> bool: ...

    @property
    def starved(self) -> bool: ...

    @property
    def awaits(self) -> bool: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]: ...

    def step(self) -> list[TokenDelta]: ...

    @property
    def lost(self) -> DeviceLostError | None: ...

    @property
    def settled(self) -> bool: ...

    def pause(self, mode: PauseMode) -> list[TokenDelta]: ...

    def resume(self) -> list[TokenDelta]: ...

    def check_sleep(self, level: int) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, parts: Iterable[SleepTag]) -> list[TokenDelta]: ...

    def reset_prefix_cache(self) -> None: ...

    def check_weights(self) -> WorkerPort: ...

    def update_weights(self, staged: Staged, version: str | None = None, *, flush_cache: bool = True) -> None: ...

    def start_profile(self, prefix: str = "") -> None: ...

    def stop_profile(self) -> str: ...

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any: ...

    def idle(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def check_idle(self, *, books: bool) -> None: ...

    def mend(self) -> None: ...

    def close(self) -> None: ...


MakeCore = Callable[[OnPhase], tuple[Loop, ModelInfo]]

LOST = 70
"""Exit code of a core whose device was lost (EX_SOFTWARE of sysexits.h)."""
_IDLE_POLL_MS = 1000
_STARVED_POLL_MS = 1
_UPDATE_POLL_MS = 20
_QUIET_S = 0.9
"""The books are checked so long after the last request: clients send the next one at once, or later."""
_HELLO_S = 1.0
_LEAVE_S = 5.0
_STATS_S = 0.05


class CoreServer:
    """Single-threaded: messages are read between steps, so an abort takes effect within one step.

    Any number of front ends may connect. Each receives the deltas of its own requests, and the counters.
    """

    def __init__(self, listener: socket.socket, garbage: Garbage | None = None) -> None:
        """
        Args:
            listener: from `listen_at`; it is closed at the end.
            garbage: of the process; None to leave it to Python, as in a thread of another process.
        """
        self._garbage = garbage
        self._connections = Connections(listener)
        self._clients: list[Connection] = []
        self._owner: dict[str, Connection] = {}
        self._remaining: dict[str, int] = {}
        self._settling: list[tuple[Connection, wire.Pause | wire.Sleep | Update]] = []
        self._updates: Updates[Connection] = Updates()
        self._calls: list[tuple[Connection, int, Future[Any]]] = []
        """Calls of features that have no result yet, each with its number."""
        self._long: set[tuple[Connection, int]] = set()
        """Long commands that are not answered: their front ends, which may be gone, and their numbers. All front ends
        are told whether there are any, since each watches the core's health."""
        self._answered = False
        """Features' calls were answered in the last turn, so features may go on."""
        self._info: ModelInfo | None = None
        self._loop: Loop | None = None
        self._lost: wire.Lost | None = None
        self._stats_due = 0.0
        self._unchecked_since: float | None = None
        """When the engine became idle, if its books were not checked since then."""
        self._alive = True
        self._parent = os.getppid()

    def run(self, make_core: MakeCore) -> int:
        """Start the core and serve until it is stopped or its device is lost; return the process's exit code."""
        self._wait_for_hello()
        try:
            self._loop, self._info = make_core(self._on_phase)
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("the engine core failed to start")
            self._broadcast(wire.Failed(Failure.of(error)))
            return self._close(1)
        self._broadcast(wire.Ready(self._info))
        if self._garbage is not None:
            self._garbage.take_over()
        lost = self._serve(self._loop)
        if lost is not None:
            self._take_leave(lost)
            return self._close(LOST)
        self._loop.close()
        return self._close(0)

    def _wait_for_hello(self) -> None:
        """Wait, for a limited time, for a first front end that receives the phases and errors of the start."""
        until = time.monotonic() + _HELLO_S
        while not self._clients and (left := until - time.monotonic()) > 0:
            self._receive(int(left * 1000) + 1)

    def _take_leave(self, lost: DeviceLostError) -> None:
        """Send `Lost` to all front ends, and wait a little until they have read it and disconnected.

        Their messages are read and dropped: closing a socket with unread messages may reset the connection before the
        peer has read the last message.
        """
        self._loop, self._lost = None, wire.Lost(str(lost))
        self._broadcast(self._lost)
        until = time.monotonic() + _LEAVE_S
        while self._clients and (left := until - time.monotonic()) > 0:
            self._receive(int(left * 1000) + 1)

    def _serve(self, loop: Loop) -> DeviceLostError | None:
        """Serve until a shutdown, or until the parent process ends or the device is lost; return the loss, if any."""
        try:
            while self._alive and os.getppid() == self._parent and loop.lost is None:
                self._receive(self._patience_ms(loop))
                self._turn(loop)
        except DeviceLostError as error:
            return error
        return loop.lost

    def _turn(self, loop: Loop) -> None:
        """Run one step, or send a heartbeat, and then the commands that waited for it."""
        with self._connections.together():  # a call may have begun work in a thread, which its answer must not wait for
            self._advance(loop)
            self._answered = bool(self._calls) and self._answer_calls()
        for job in self._updates.done():
            self._end_job(loop, job)
        if self._settling and loop.settled:
            self._settle(loop)

    def _advance(self, loop: Loop) -> None:
        """Run one step, or look after an idle engine, and send the news."""
        if not loop.busy:
            loop.idle()
            if self._unchecked_since is not None and time.monotonic() - self._unchecked_since > _QUIET_S:
                self._unchecked_since = None
                self._check_idle(loop, books=True)
                self._collect_garbage(quiet=True)
            if not self._only_polls(loop):
                self._send_news([])
            return
        deltas = loop.step()
        self._collect_garbage(quiet=False)
        waits = loop.starved and loop.busy  # else the last gauges sent are those of an idle engine
        if deltas or not waits or time.monotonic() >= self._stats_due:
            self._send_news(deltas)
        if not loop.busy and loop.lost is None:
            self._unchecked_since = time.monotonic()
            self._check_idle(loop, books=False)

    def _check_idle(self, loop: Loop, *, books: bool) -> None:
        """Check that nothing is left of the requests that have ended; what is left does not end the process."""
        try:
            loop.check_idle(books=books)
        except AssertionError:
            log.exception("a bug in Octavo left something of ended requests; it is freed, and cached prompts are lost")
            loop.mend()

    def _collect_garbage(self, *, quiet: bool) -> None:
        if self._garbage is not None:
            self._garbage.collect(quiet=quiet)

    def _only_polls(self, loop: Loop) -> bool:
        """Whether the loop turns often only since features' calls have no result yet, or their threads work, and gauges
        were just sent: making them each time would take the interpreter from those threads."""
        waits = (bool(self._calls) or loop.awaits) and not any(result.done() for *_, result in self._calls)
        return waits and time.monotonic() < self._stats_due

    def _patience_ms(self, loop: Loop) -> int:
        """Return how long to wait for a message, in milliseconds."""
        if self._answered:
            return 0
        if loop.busy:
            return _STARVED_POLL_MS if loop.starved else 0
        if self._calls or loop.awaits:
            return _STARVED_POLL_MS
        return _UPDATE_POLL_MS if self._updates.busy else _IDLE_POLL_MS

    def _receive(self, wait_ms: int) -> None:
        """Wait at most `wait_ms` for messages and handle all that have arrived."""
        for client, message in self._connections.receive(wait_ms):
            if message is None:
                self._forget(client)
                continue
            try:
                self._handle(client, wire.decode_to_core(message))
            except msgspec.DecodeError:
                log.exception("ignored a message of a front end that can't be decoded")

    def _handle(self, client: Connection, message: wire.ToCore) -> None:
        match message:
            case wire.Hello():
                self._clients.append(client)
                if self._info is not None:
                    self._send(client, wire.Ready(self._info))
                if self._long:
                    self._send(client, wire.Occupied(by_command=True))
                if self._lost is not None:
                    self._send(client, self._lost)
            case wire.Add(request) if self._loop is not None:
                self._add(self._loop, client, request)
            case wire.Abort(request_id, index) if self._loop is not None:
                self._abort(self._loop, request_id, index)
            case wire.Shutdown():
                self._alive = False
            case _ if isinstance(message, wire.Command):
                self._command(client, message)

    def _command(self, client: Connection, command: wire.Command) -> None:
        """Execute a command. Commands that wait for steps in flight are answered once these have ended."""
        if self._loop is None:
            return
        if isinstance(command, wire.LONG):
            self._long.add((client, command.call))
            if len(self._long) == 1:
                self._broadcast(wire.Occupied(by_command=True))
        value: Any = None
        try:
            match command:
                case wire.Reset():
                    self._loop.reset_prefix_cache()
                    self._tell([])
                case wire.Pause() | wire.Sleep():
                    if isinstance(command, wire.Sleep):
                        self._loop.check_sleep(command.level)
                    self._tell(self._loop.pause(command.mode))
                    self._settling.append((client, command))
                    return
                case wire.Resume():
                    self._tell(self._loop.resume())
                    self._unsettle()
                case wire.WakeUp(_, parts):
                    self._tell(self._loop.wake_up(parts))
                case wire.AbortNamed(_, names):
                    value = self._abort_named(self._loop, names)
                case wire.StartProfile(_, prefix):
                    self._loop.start_profile(prefix)
                case wire.StopProfile():
                    value = self._loop.stop_profile()
                case wire.CallFeature(number, feature, method, args):
                    value = self._loop.call(feature, method, args)
                    if isinstance(value, Future):
                        self._calls.append((client, number, value))
                        return
                case wire.UpdateWeights() | wire.BeginWeights() | wire.ReceiveWeights():
                    self._updates.begin(client, command, partial(_do, self._loop.check_weights(), command))
                    return
        except Exception as error:
            self._reply(client, _failed(command.call, error))
            return
        self._reply(client, wire.Done(command.call, value))

    def _reply(self, client: Connection, done: wire.Done) -> None:
        """Answer a command."""
        if (client, done.call) in self._long:
            self._long.remove((client, done.call))
            if not self._long:
                self._broadcast(wire.Occupied(by_command=False))  # first: with the answer, the command is over
        self._send(client, done)

    def _abort_named(self, loop: Loop, names: list[str] | None) -> int:
        """End the requests with these names, or all; return their number."""
        ended = list(self._owner)
        if names is not None:
            ended = [one for one in ended if any(answers_to(one, name) for name in names)]
        for request_id in ended:
            self._abort(loop, request_id)
        return len(ended)

    def _abort(self, loop: Loop, request_id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. An error is logged, since it must not end the other requests."""
        try:
            news = loop.abort(request_id, index)
        except Exception:
            log.exception("the request %s could not be aborted", request_id)
            return
        self._send_news(news)

    def _answer_calls(self) -> bool:
        """Send the results of features' calls that have one by now; return whether there are any."""
        calls, self._calls = self._calls, []
        for client, number, result in calls:
            if not result.done():
                self._calls.append((client, number, result))
                continue
            try:
                done = wire.Done(number, result.result())
            except Exception as error:
                done = _failed(number, error)
            self._reply(client, done)
        return len(self._calls) < len(calls)

    def _end_job(self, loop: Loop, job: WeightUpdate[Connection]) -> None:
        """Answer a job that has read tensors, or pause the loop for the update if the weights are to be replaced."""
        client, command = job.client, job.command
        try:
            value = job.done.result()
        except Exception as error:
            self._reply(client, _failed(command.call, error))
            return
        if isinstance(command, wire.UpdateWeights):
            ours = any(isinstance(other, Update) and other.resumes for _, other in self._settling)
            update = Update(command, value, resumes=ours or not loop.stats().paused)
            self._settling.append((client, update))
            if update.resumes or command.mode is PauseMode.ABORT:
                self._tell(loop.pause(command.mode))
        else:
            self._reply(client, wire.Done(command.call))

    def _settle(self, loop: Loop) -> None:
        """Execute and answer the commands that waited for the loop to settle."""
        settling, self._settling = self._settling, []
        for client, command in settling:
            value = None
            try:
                match command:
                    case wire.Sleep():
                        loop.sleep(command.level)
                    case Update():
                        value = self._replace_weights(loop, command)
                    case _ if command.clear_cache and command.mode is not PauseMode.KEEP:
                        loop.reset_prefix_cache()
            except Exception as error:
                self._reply(client, _failed(command.call, error))
                continue
            self._tell([])
            self._reply(client, wire.Done(command.call, value))
        if all(isinstance(command, Update) and command.resumes for _, command in settling):
            self._tell(loop.resume())

    def _replace_weights(self, loop: Loop, update: Update) -> dict[str, Any]:
        wish = update.command
        loop.update_weights(update.staged, wish.version, flush_cache=wish.flush_cache)
        return {"weight_version": loop.stats().weight_version, "num_paused_requests": len(self._owner)}

    def _unsettle(self) -> None:
        """Fail the commands that wait for a pause which another client has ended."""
        settling, self._settling = self._settling, []
        for client, command in settling:
            error = EngineStateError("The pause was ended before all running requests had stopped.")
            self._reply(client, _failed(command.call, error))

    def _add(self, loop: Loop, client: Connection, request: GenerateRequest) -> None:
        was_busy = loop.busy
        try:
            loop.add(request)
        except InvalidRequestError as error:
            self._send(client, wire.RequestRefused(request.id, error.message, error.param))
            return
        except DeviceLostError:
            raise
        except Exception as error:  # ends this request only
            log.exception("request %s could not be queued; it ends", request.id)
            self._send(client, wire.StepDeltas(failed(request.id, range(request.params.n), internal_error(error))))
            return
        self._owner[request.id] = client
        self._remaining[request.id] = request.params.n
        if not was_busy and len(self._clients) > 1:
            self._tell([])  # all clients' health checks expect steps from now on

    def _forget(self, client: Connection) -> None:
        """Remove a front end that has disconnected, and abort its requests."""
        if client in self._clients:
            self._clients.remove(client)
        left = [request_id for request_id, owner in self._owner.items() if owner == client]
        if left:
            log.warning("a front end has disconnected; its %d unfinished requests are aborted", len(left))
        for request_id in left:
            if self._loop is not None:
                self._abort(self._loop, request_id)

    def _tell(self, deltas: list[TokenDelta]) -> None:
        """Send deltas together with current stats, since the state has changed."""
        self._stats_due = 0.0
        self._send_news(deltas)

    def _send_news(self, deltas: list[TokenDelta]) -> None:
        if self._loop is None:
            return
        stats = self._due_stats(self._loop)
        for client in self._clients:
            own = [delta for delta in deltas if self._owner.get(delta.id) is client]
            self._send(client, wire.StepDeltas(own, stats))
        for delta in deltas:
            if delta.finish is not None:
                self._remaining[delta.id] -= 1
                if not self._remaining[delta.id]:
                    del self._remaining[delta.id], self._owner[delta.id]

    def _due_stats(self, loop: Loop) -> EngineStats | None:
        """Return the stats if they are due, else None.

        A busy engine sends them every `_STATS_S` only, since they cost more than the delta of a token.
        """
        now = time.monotonic()
        if loop.busy and now < self._stats_due:
            return None
        self._stats_due = now + _STATS_S
        return loop.stats()

    def _on_phase(self, name: str, seconds: float | None) -> None:
        self._receive(0)
        self._broadcast(wire.Phase(name, seconds))

    def _broadcast(self, message: wire.ToClient) -> None:
        for client in self._clients:
            self._send(client, message)

    def _send(self, client: Connection, message: wire.ToClient) -> None:
        self._connections.send(client, wire.encode(message))

    def _close(self, code: int) -> int:
        self._updates.close()
        self._connections.close()
        return code


def _do(worker: WorkerPort, command: wire.WeightCommand) -> Any:
    match command:
        case wire.BeginWeights():
            return worker.begin_weights()
        case wire.ReceiveWeights(_, update_info):
            return worker.receive_weights(update_info)
        case wire.UpdateWeights(received=True):
            return worker.stage_received()
        case wire.UpdateWeights(path=path, load_format=load_format):
            return worker.stage_weights(path, load_format)


def _failed(call: int, error: Exception) -> wire.Done:
    if not isinstance(error, OctavoError):
        log.exception("a front end's command failed", exc_info=error)
    return wire.Done(call, failure=Failure.of(error))
