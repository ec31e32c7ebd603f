"""`CoreServer`: an engine loop behind a socket, in a process of its own. Its clients are `CoreClient`s."""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.info import ModelInfo
from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine import wire
from octavo.engine.connections import Connection, Connections

log = logging.getLogger(__name__)

OnPhase = Callable[[str, float | None], None]


class Loop(Protocol):
    """What is served: an `EngineLoop`, or something that stands in for it."""

    @property
    def busy(self) -> bool: ...

    @property
    def starved(self) -> bool: ...

    def add(self, request: GenerateRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]: ...

    def step(self) -> list[TokenDelta]: ...

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def check_idle(self) -> None: ...

    def close(self) -> None: ...


MakeCore = Callable[[OnPhase], tuple[Loop, ModelInfo]]

_IDLE_POLL_MS = 1000
_STARVED_POLL_MS = 2
_HELLO_S = 1.0
_STATS_S = 0.05


class CoreServer:
    """Single-threaded: messages are read between steps, so an abort takes effect within one step.

    Any number of front ends may connect; each gets the news of its own requests, and everybody the counters.
    """

    def __init__(self, listener: socket.socket) -> None:
        """`listener`: see `listen_at`; it is closed at the end."""
        self._connections = Connections(listener)
        self._clients: list[Connection] = []
        self._owner: dict[str, Connection] = {}
        self._remaining: dict[str, int] = {}
        self._info: ModelInfo | None = None
        self._loop: Loop | None = None
        self._stats_due = 0.0
        self._alive = True
        self._parent = os.getppid()

    def run(self, make_core: MakeCore) -> int:
        """Start the core, serve until told to stop; returns the process's exit code."""
        self._wait_for_hello()
        try:
            self._loop, self._info = make_core(self._on_phase)
        except OctavoError as error:
            self._broadcast(wire.Failed(type(error).__name__, str(error)))
            return self._close(1)
        except Exception as error:
            log.exception("the engine core could not start")
            self._broadcast(wire.Failed(type(error).__name__, f"{type(error).__name__}: {error}"))
            return self._close(1)
        self._broadcast(wire.Ready(self._info))
        gc.collect()
        gc.freeze()
        self._serve(self._loop)
        self._loop.close()
        return self._close(0)

    def _wait_for_hello(self) -> None:
        """So that somebody hears of the phases, and of what may go wrong in them; but not for ever."""
        until = time.monotonic() + _HELLO_S
        while not self._clients and (left := until - time.monotonic()) > 0:
            self._receive(int(left * 1000) + 1)

    def _serve(self, loop: Loop) -> None:
        while self._alive and os.getppid() == self._parent:
            self._receive(_IDLE_POLL_MS if not loop.busy else _STARVED_POLL_MS if loop.starved else 0)
            if loop.busy:
                deltas = loop.step()
                if deltas or not loop.starved or not loop.busy:  # the last gauges told shall be those of an idle engine
                    self._send_news(deltas)
                if not loop.busy:
                    loop.check_idle()

    def _receive(self, wait_ms: int) -> None:
        """Handle all messages that are there, after a wait for the first."""
        for client, message in self._connections.receive(wait_ms):
            if message is None:
                self._forget(client)
                continue
            try:
                self._handle(client, wire.decode_to_core(message))
            except msgspec.DecodeError:
                log.exception("a front end sent a message that can't be read; it is ignored")

    def _handle(self, client: Connection, message: wire.ToCore) -> None:
        match message:
            case wire.Hello():
                self._clients.append(client)
                if self._info is not None:
                    self._send(client, wire.Ready(self._info))
            case wire.Add(request) if self._loop is not None:
                self._add(self._loop, client, request)
            case wire.Abort(request_id, index) if self._loop is not None:
                self._send_news(self._loop.abort(request_id, index))
            case wire.Reset() if self._loop is not None:
                self._loop.reset_prefix_cache()
            case wire.Shutdown():
                self._alive = False

    def _add(self, loop: Loop, client: Connection, request: GenerateRequest) -> None:
        was_busy = loop.busy
        try:
            loop.add(request)
        except InvalidRequestError as error:
            self._send(client, wire.Refused(request.id, error.message, error.param))
            return
        self._owner[request.id] = client
        self._remaining[request.id] = request.params.n
        if not was_busy and len(self._clients) > 1:
            self._stats_due = 0.0
            self._send_news([])  # so that all know that steps are due from now on

    def _forget(self, client: Connection) -> None:
        """It is gone: its requests end, and it gets no more news."""
        if client in self._clients:
            self._clients.remove(client)
        for request_id in [request_id for request_id, owner in self._owner.items() if owner == client]:
            if self._loop is not None:
                self._send_news(self._loop.abort(request_id))

    def _send_news(self, deltas: list[TokenDelta]) -> None:
        if self._loop is None:
            return
        stats = self._due_stats(self._loop)
        for client in self._clients:
            own = [delta for delta in deltas if self._owner.get(delta.id) is client]
            self._send(client, wire.News(own, stats))
        for delta in deltas:
            if delta.finish is not None:
                self._remaining[delta.id] -= 1
                if not self._remaining[delta.id]:
                    del self._remaining[delta.id], self._owner[delta.id]

    def _due_stats(self, loop: Loop) -> EngineStats | None:
        """Those of a busy engine are stale at once, and cost more than the news of a token."""
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
        self._connections.close()
        return code


class PhaseTimer:
    """Times the phases of a start, one after the other, and reports each to `on_phase`."""

    def __init__(self, on_phase: OnPhase) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._name = ""
        self._began = 0.0

    def begin(self, name: str) -> None:
        """End the phase before, if any, and begin this one."""
        self.end()
        self._name, self._began = name, time.perf_counter()
        self._on_phase(name, None)

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = round(time.perf_counter() - self._began, 3)
            self._on_phase(self._name, self.seconds[self._name])
            self._name = ""
