"""`CoreClient`: an `EngineClient` for a core in another process, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import zmq
import zmq.asyncio

from octavo.core import errors
from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError, SlowReaderError
from octavo.core.info import Health, ModelInfo
from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine import wire
from octavo.engine.inbox import Inbox
from octavo.engine.process import CoreProcess

log = logging.getLogger(__name__)

_FAREWELL_MS = 1000

OnPhase = Callable[[str, float | None], None]


class Process(Protocol):
    """A core's process: one's own (`CoreProcess`), or somebody else's (`CoreElsewhere`)."""

    address: str

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    async def exited(self) -> None: ...

    def obituary(self) -> str: ...

    def stop(self) -> None: ...


class CoreClient:
    """Owns the core's process unless it has a name. Every coroutine runs on the event loop that made it, by `start`."""

    def __init__(
        self, process: Process, stall_after_s: float, max_unread_tokens: int | None = None, name: bytes | None = None
    ) -> None:
        self.slow_readers = 0
        self._process = process
        self._name = name
        self._stall_after_s = stall_after_s
        self._max_unread = max_unread_tokens
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if name is not None:
            self._socket.setsockopt(zmq.IDENTITY, name)
            self._socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
        self._socket.connect(process.address)
        self._streams: dict[str, Inbox] = {}
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._dead: str | None = None
        self._progress_at = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        process: Process,
        *,
        stall_after_s: float = 120.0,
        max_unread_tokens: int | None = None,
        on_phase: OnPhase | None = None,
        name: bytes | None = None,
    ) -> CoreClient:
        """Wait until the core is ready.

        Args:
            max_unread_tokens: a request of which more wait to be read is ended with SlowReaderError; None for no limit.
            name: of one of several clients of a core; the core outlives it. Never given twice.

        Raises:
            OctavoError: what kept it from starting, as the same class where that is one of `core.errors`.
            EngineDeadError: it died without a word.
        """
        client = cls(process, stall_after_s, max_unread_tokens, name)
        try:
            await client._wait_ready(on_phase)
        except BaseException:
            await client.close()
            raise
        client._tasks = [asyncio.create_task(client._read()), asyncio.create_task(client._watch())]
        return client

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise AssertionError("the core is not ready")
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request.id in self._streams:
            raise InvalidRequestError(
                "request_id is in use by a running request.", param="request_id", value=request.id
            )
        if not self._streams:
            self._progress_at = time.monotonic()
        inbox = self._streams[request.id] = Inbox()
        remaining = request.params.n
        try:
            self._send(wire.Add(request))
            while remaining:
                delta = await inbox.get()
                remaining -= delta.finish is not None
                yield delta
        finally:
            del self._streams[request.id]
            if remaining:
                self._send(wire.Abort(request.id))

    @property
    def process(self) -> Process:
        return self._process

    def bury(self, name: bytes) -> None:
        """Tell the core that the client of this name is dead, so that its requests end."""
        self._send(wire.Leave(name))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(wire.Abort(request_id, index))

    async def reset_prefix_cache(self) -> None:
        self._send(wire.Reset())

    def stats(self) -> EngineStats:
        return self._stats

    def health(self) -> Health:
        if self._dead is not None:
            return Health(ok=False, reason=self._dead)
        waited = time.monotonic() - self._progress_at
        # Of all clients, by the core's last news; one's own requests may be news to it.
        waiting = max(len(self._streams), self._stats.num_running + self._stats.num_waiting)
        if waiting and waited > self._stall_after_s:
            reason = f"{waiting} requests wait, but no step has completed for {waited:.0f} s."
            return Health(ok=False, reason=reason, stalled_s=waited)
        return Health(ok=True)

    @property
    def dead(self) -> str | None:
        """Why the core has stopped; None if it has not."""
        return self._dead

    def kill(self) -> None:
        """End the core's process now, if it is one's own. Streams that are still open end with EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        if not self._socket.closed:
            if isinstance(self._process, CoreProcess):
                self._process.kill()
            self._die("The engine was closed.")
            self._socket.close()
            self._context.term()

    async def close(self) -> None:
        """Stop one's own core and wait until its process is gone. Streams that are open end with EngineDeadError."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if not self._socket.closed:
            if self._dead is None and self._process.alive:
                with contextlib.suppress(zmq.ZMQError):
                    await self._socket.send(wire.encode(wire.Leave(self._name) if self._name else wire.Shutdown()))
            await asyncio.to_thread(self._process.stop)
            self._die("The engine was closed.")
            self._socket.close()
            self._context.term()

    async def _wait_ready(self, on_phase: OnPhase | None) -> None:
        self._send(wire.Hello())
        while self._info is None:
            if not await self._socket.poll(200):
                if not self._process.alive:
                    raise EngineDeadError(self._process.obituary())
                continue
            match wire.decode_to_client(await self._socket.recv()):
                case wire.Ready(info):
                    self._info = info
                case wire.Failed(kind, message):
                    raise _error_of(kind, message)
                case wire.Phase(name, seconds):
                    if on_phase is not None:
                        on_phase(name, seconds)
                case _:
                    pass

    async def _read(self) -> None:
        while True:
            message = wire.decode_to_client(await self._socket.recv())
            self._progress_at = time.monotonic()
            self._take(message)

    def _take(self, message: wire.ToClient) -> None:
        match message:
            case wire.News(deltas, stats):
                self._stats = stats
                for delta in deltas:
                    inbox = self._streams.get(delta.id)
                    if inbox is not None:
                        inbox.put(delta)
                        if self._max_unread is not None and inbox.overflows(self._max_unread):
                            self._suspect(delta.id, inbox, self._max_unread)
            case wire.Refused(request_id, text, param):
                inbox = self._streams.get(request_id)
                if inbox is not None:
                    inbox.fail(InvalidRequestError(text, param=param))
            case _:
                pass

    def _suspect(self, request_id: str, inbox: Inbox, limit: int) -> None:
        """Look again after the reader's turn: perhaps it was only the event loop that lagged."""
        if not inbox.suspect:
            inbox.suspect = True
            asyncio.get_running_loop().call_soon(self._judge, request_id, inbox, limit)

    def _judge(self, request_id: str, inbox: Inbox, limit: int) -> None:
        """End a request whose reader lags too far behind; it may still read what is there."""
        inbox.suspect = False
        if not inbox.overflows(limit):
            return
        self.slow_readers += 1
        log.warning("Request %s is ended: its client reads too slowly, %d tokens wait.", request_id, inbox.tokens)
        inbox.fail(SlowReaderError(limit))
        self._send(wire.Abort(request_id))

    async def _watch(self) -> None:
        await self._process.exited()
        reason = self._process.obituary()
        log.error("%s", reason)
        self._die(reason)

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        for inbox in self._streams.values():
            inbox.fail(EngineDeadError(self._dead))

    def _send(self, message: wire.ToCore) -> None:
        """Hand a message to ZeroMQ, which never blocks here: the queue has no limit."""
        if self._dead is None and not self._socket.closed:
            future = asyncio.ensure_future(self._socket.send(wire.encode(message)))
            future.add_done_callback(_complain)


def _complain(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and future.exception() is not None:
        log.error("a message to the engine core was lost: %s", future.exception())


def _error_of(kind: str, message: str) -> OctavoError:
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, OctavoError):
        error = cls.__new__(cls)
        Exception.__init__(error, message)
        return error
    return EngineDeadError(f"The engine core could not start: {message}")
