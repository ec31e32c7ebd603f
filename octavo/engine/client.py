"""`CoreClient`: an `EngineClient` for a core in another process, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from octavo.core.errors import EngineDeadError, InvalidRequestError, SlowReaderError, id_in_use
from octavo.core.info import Health, ModelInfo, Received
from octavo.core.output import TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine import wire
from octavo.engine.frames import Frames, frame
from octavo.engine.inbox import Inbox
from octavo.engine.phases import OnPhase
from octavo.engine.process import CoreElsewhere, CoreProcess, is_stopped

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_LATE_S = 1.0
_ENDING_S = 1.0
"""Seconds to wait for a process to end after its socket has failed."""
_DRAIN_S = 1.0
"""Seconds to read what a process sent before it ended."""
_SILENCE_S = 10.0


class Process(Protocol):
    """A core's process: a child of this process (`CoreProcess`), or another one's child (`CoreElsewhere`)."""

    address: str

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    async def exited(self) -> None: ...

    def obituary(self) -> str: ...

    def show_stacks(self) -> None: ...

    def stop(self) -> None: ...


class CoreClient:
    """Client of an engine core; owns the core's process if it is a `CoreProcess`. Bound to the event loop of
    `start`."""

    def __init__(
        self, process: Process, stall_after_s: float, max_unread_tokens: int | None, on_phase: OnPhase
    ) -> None:
        self.slow_readers = 0
        self._process = process
        self._stall_after_s = stall_after_s
        self._max_unread = max_unread_tokens
        self._on_phase = on_phase
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, Inbox] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._long: set[int] = set()
        """Numbers of the long commands that the core has not answered, even if nothing here waits for the answer."""
        self._occupied = False
        """The core executes a long command of any front end."""
        self._numbers = itertools.count()
        self._stats = EngineStats()
        self._dead: str | None = None
        self._heard_at = self._looked_at = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self._disconnected = asyncio.Event()

    @classmethod
    async def start(
        cls,
        process: Process,
        *,
        stall_after_s: float = 120.0,
        max_unread_tokens: int | None = None,
        on_phase: OnPhase | None = None,
    ) -> CoreClient:
        """Connect to the core and wait until it is ready.

        Args:
            stall_after_s: seconds without a completed step after which a busy core counts as unhealthy.
            max_unread_tokens: end a request with SlowReaderError if more of its tokens are unread; None for no limit.
            on_phase: called with the phases of the start.

        Raises:
            OctavoError: the core could not start; of the original class if that is one of `core.errors`.
            EngineDeadError: the core ended without reporting an error.
        """
        client = cls(process, stall_after_s, max_unread_tokens, on_phase or _unheard)
        try:
            await client._connect()
        except BaseException:
            await client.close()
            raise
        client._watching = asyncio.create_task(client._watch())
        return client

    @property
    def info(self) -> ModelInfo:
        return self._ready.result()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        if request.id in self._streams:
            raise id_in_use(request.id)
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

    async def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(wire.Abort(request_id, index))

    async def reset_prefix_cache(self) -> None:
        await self._call(wire.Reset)

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        await self._call(lambda call: wire.Pause(call, mode, clear_cache))

    async def resume(self) -> None:
        await self._call(wire.Resume)

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self._call(lambda call: wire.Sleep(call, level, mode))

    async def wake_up(self, parts: Iterable[SleepTag]) -> None:
        await self._call(lambda call: wire.WakeUp(call, list(parts)))

    async def abort_named(self, names: Iterable[str] | None) -> int:
        return int(await self._call(lambda call: wire.AbortNamed(call, None if names is None else list(names))))

    async def start_profile(self, prefix: str = "") -> None:
        await self._call(lambda call: wire.StartProfile(call, prefix))

    async def stop_profile(self) -> str:
        return str(await self._call(wire.StopProfile))

    async def update_weights(
        self,
        path: str | None = None,
        load_format: str | None = None,
        *,
        received: bool = False,
        mode: PauseMode = PauseMode.KEEP,
        flush_cache: bool = True,
        version: str | None = None,
    ) -> dict[str, Any]:
        wish = (path, load_format, received, mode, flush_cache, version)
        return dict(await self._call(lambda call: wire.UpdateWeights(call, *wish)))

    async def begin_weights(self) -> None:
        await self._call(wire.BeginWeights)

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        await self._call(lambda call: wire.ReceiveWeights(call, dict(update_info)))

    async def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        return await self._call(lambda call: wire.CallFeature(call, feature, method, dict(args)))

    async def _call(self, command: Callable[[int], wire.Command]) -> Any:
        """Send a command to the core and return its result when it is done."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        message = command(number)
        if isinstance(message, wire.LONG):
            self._long.add(number)
        try:
            self._send(message)
            return await answer
        finally:
            del self._calls[number]

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def replicas(self) -> list[CoreClient]:
        return [self]

    def health(self) -> Health:
        if self._dead is not None:
            return Health(ok=False, final=True, reason=self._dead)
        if self.commanded:
            return Health(ok=True)
        now = time.monotonic()
        silent = now - self._heard_at - self._stood_still(now)
        # Requests of all clients, as of the core's last update; it may not have counted this client's newest ones yet.
        waiting = max(len(self._streams), self._stats.num_running + self._stats.num_waiting)
        if waiting and silent > self._stall_after_s and not self._stats.paused:
            return Health(ok=False, reason=f"{waiting} requests wait, but no step has completed for {silent:.0f} s.")
        if silent > max(self._stall_after_s, _SILENCE_S):
            return Health(ok=False, reason=f"The engine core is idle, but has sent no heartbeat for {silent:.0f} s.")
        return Health(ok=True)

    def received(self, request_id: str) -> Received:
        inbox = self._streams.get(request_id)
        return Received() if inbox is None else Received(inbox.total, inbox.at)

    @property
    def dead(self) -> str | None:
        """Why the core has stopped; None if it has not."""
        return self._dead

    @property
    def commanded(self) -> bool:
        """Whether the core is executing a command, of any client, during which it may send nothing for minutes."""
        return bool(self._long) or self._occupied

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the core's process."""
        return is_stopped(self._process.pid)

    async def end(self, reason: str) -> None:
        """Kill a core that hangs. Open streams end with EngineDeadError, which gives the reason."""
        self._die(reason)
        if isinstance(self._process, CoreProcess):
            await asyncio.to_thread(self._process.kill)

    def kill(self) -> None:
        """Kill the core's process, if this client owns it. Open streams end with EngineDeadError."""
        if self._watching is not None:
            self._watching.cancel()
        if isinstance(self._process, CoreProcess):
            self._process.kill()
        self._die("The engine was closed.")
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Stop the core, if this client owns it, and wait for its end. Open streams end with EngineDeadError."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if isinstance(self._process, CoreProcess) and not self._ready.done():
            self._process.kill()  # it reads no messages while it loads
        elif not isinstance(self._process, CoreElsewhere):
            self._send(wire.Shutdown())
            await asyncio.to_thread(self._process.stop)
        self._die("The engine was closed.")
        if self._transport is not None:
            self._transport.close()
        if self._ready.done():
            self._ready.exception()  # mark as retrieved: a start that was given up logs no error

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            receiver = partial(_Receiver, self._take, self._disconnected)
            self._transport, _ = await loop.create_unix_connection(receiver, self._process.address)
        except OSError as exc:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDING_S):
                    await self._process.exited()
                raise EngineDeadError(self._process.obituary()) from None
            raise EngineDeadError(
                f"The engine core's socket {self._process.address} can't be reached ({exc.strerror or exc}). If its "
                "folder was removed, restart the server."
            ) from None
        self._send(wire.Hello())
        while not self._ready.done():
            alive = self._process.alive
            await asyncio.wait({self._ready}, timeout=_LOOK_S)
            if not alive and not self._ready.done():
                raise EngineDeadError(self._process.obituary())
        self._ready.result()

    def _take(self, message: wire.ToClient) -> None:
        self._heard_at = time.monotonic()
        match message:
            case wire.StepDeltas():
                self._spread(message)
            case wire.RequestRefused(request_id, text, param):
                inbox = self._streams.get(request_id)
                if inbox is not None:
                    inbox.fail(InvalidRequestError(text, param=param))
            case wire.Done():
                self._answer(message)
            case wire.Occupied(by_command):
                self._occupied = by_command
            case wire.Phase(name, seconds):
                self._on_phase(name, seconds)
            case wire.Ready(info):
                self._ready.set_result(info)
            case wire.Lost(text):
                log.critical("%s", text)
                self._die(text)
                if self._transport is not None:
                    self._transport.close()
            case wire.Failed(failure):
                self._ready.set_exception(failure.error("could not start"))

    def _answer(self, done: wire.Done) -> None:
        self._long.discard(done.call)
        call = self._calls.get(done.call)
        if call is None or call.done():
            return
        if done.failure is None:
            call.set_result(done.value)
        else:
            call.set_exception(done.failure.error("failed at this"))

    def _spread(self, news: wire.StepDeltas) -> None:
        if news.stats is not None and self._dead is None:
            self._stats = news.stats
        for delta in news.deltas:
            inbox = self._streams.get(delta.id)
            if inbox is not None:
                inbox.put(delta)
                inbox.at = self._heard_at
                if self._max_unread is not None and inbox.overflows(self._max_unread):
                    self._suspect(delta.id, inbox, self._max_unread)

    def _suspect(self, request_id: str, inbox: Inbox, limit: int) -> None:
        """Check again after the reader's turn, since only the event loop may have lagged."""
        if not inbox.suspect:
            inbox.suspect = True
            asyncio.get_running_loop().call_soon(self._judge, request_id, inbox, limit)

    def _judge(self, request_id: str, inbox: Inbox, limit: int) -> None:
        """End a request whose reader is too slow; it can still read the buffered deltas."""
        inbox.suspect = False
        if not inbox.overflows(limit):
            return
        self.slow_readers += 1
        log.warning("request %s was ended: its client reads too slowly, %d tokens are unread", request_id, inbox.tokens)
        inbox.fail(SlowReaderError(limit))
        self._send(wire.Abort(request_id))

    async def _watch(self) -> None:
        exited = asyncio.create_task(self._process.exited())
        was_well = True
        self._looked_at = time.monotonic()
        try:
            while not exited.done():
                await asyncio.wait({exited}, timeout=_LOOK_S)
                self._look()
                was_well = self._report(was_well)
        finally:
            exited.cancel()
        with contextlib.suppress(TimeoutError):  # its last message may not be read yet
            async with asyncio.timeout(_DRAIN_S):
                await self._disconnected.wait()
        if self._dead is None:
            reason = self._process.obituary()
            log.error("%s", reason)
            self._die(reason)

    def _look(self) -> None:
        now = time.monotonic()
        self._heard_at = min(self._heard_at + self._stood_still(now), now)
        self._looked_at = now

    def _stood_still(self, now: float) -> float:
        """Return the seconds for which this process did not run (such as in a frozen container) and read no
        messages."""
        late = now - self._looked_at - _LOOK_S
        return late if self._watching is not None and late > _LATE_S else 0.0

    def _report(self, was_well: bool) -> bool:
        """Log when the core stops making progress, with its threads' stacks, and when it resumes; return its health.

        The end of a core has a line of its own.
        """
        health = self.health()
        if was_well and not health.ok and not health.final:
            log.error("The engine core makes no progress: %s The stacks of its threads follow.", health.reason)
            self._process.show_stacks()
        elif health.ok and not was_well:
            log.warning("The engine core makes progress again.")
        return health.ok

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._stats = self._stats.at_the_end()
        for inbox in self._streams.values():
            inbox.fail(EngineDeadError(self._dead))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDeadError(self._dead))

    def _send(self, message: wire.ToCore) -> None:
        """Send a message without waiting; the event loop buffers what the core can't read yet, without a limit.

        A message to a core that has disconnected is dropped: `_die` soon ends what waits for its answer.
        """
        if self._dead is None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(wire.encode(message)))


class _Receiver(asyncio.Protocol):
    """Splits the bytes from the core into messages, and sets an event when no more can come."""

    def __init__(self, take: Callable[[wire.ToClient], None], ended: asyncio.Event) -> None:
        self._take, self._ended = take, ended
        self._frames = Frames()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.take(data):
            self._take(wire.decode_to_client(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


def _unheard(phase: str, seconds: float | None) -> None:
    """Ignore a phase of the start."""
