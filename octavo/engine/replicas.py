"""`ReplicaClient`: an `EngineClient` over several cores of one model (data parallelism)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec

from octavo.core.errors import EngineDeadError, EngineStateError, OctavoError, id_in_use
from octavo.core.info import Health, ModelInfo, Received
from octavo.core.output import TokenDelta
from octavo.core.pausing import AWAKE, PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats, FeatureMetric
from octavo.engine.balance import Balance
from octavo.engine.client import CoreClient

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_QUIET_S = 0.02
_MOST_LOOKS = 5
_MOST_RESTARTS = 3
_WITHIN_S = 600.0

T = TypeVar("T")
Start = Callable[[int], Awaitable[CoreClient]]


class ReplicaClient:
    """Sends each request to one replica, and every other command to all.

    A replica that dies or hangs is started again, at most three times in ten minutes. Its requests that have no output
    yet are moved to another one; the others end with an EngineDeadError, and so does a request whose second replica
    dies: it may be what kills them.
    """

    def __init__(self, start: Start, clients: Sequence[CoreClient]) -> None:
        """Use `start`."""
        self._start = start
        self._clients = list(clients)
        self._balance = Balance(len(clients))
        self._owners: dict[str, int] = {}
        self._starting: set[int] = set()
        self._given_up: set[int] = set()
        """Replicas that died and are not started again."""
        self._restarts = [deque[float](maxlen=_MOST_RESTARTS) for _ in clients]
        self._changed = ""
        """Why a replica that starts now would have other weights; "" if it would not."""
        self._commands = 0
        """Commands that are being executed and may set apart a replica that starts meanwhile."""
        self._replaced = EngineStats()
        """Sums of the counters of replicas that were replaced."""
        self._closing = False
        self._info = clients[0].info
        self._watching = asyncio.create_task(self._watch())
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, start: Start, count: int) -> ReplicaClient:
        """Start all replicas at once.

        Args:
            start: starts a replica, given its number.

        Raises:
            OctavoError, EngineDeadError: as `CoreClient.start`, for the first replica that could not start.
        """
        found = await asyncio.gather(*(start(number) for number in range(count)), return_exceptions=True)
        failed = [one for one in found if isinstance(one, BaseException)]
        clients = [one for one in found if isinstance(one, CoreClient)]
        if failed:
            await asyncio.gather(*(client.close() for client in clients))
            raise failed[0]
        return cls(start, clients)

    @property
    def info(self) -> ModelInfo:
        """The facts of one replica."""
        return self._info

    @property
    def slow_readers(self) -> int:
        return sum(client.slow_readers for client in self._clients)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
        if request.id in self._owners:
            raise id_in_use(request.id)
        moved = False
        while True:
            number, cost = self._balance.take(request, self._alive())
            client = self._clients[number]
            self._owners[request.id] = number
            begun = False
            try:
                async with aclosing(client.generate(request)) as deltas:
                    async for delta in deltas:
                        begun = True
                        yield delta
                return
            except EngineDeadError:
                if begun or moved or self._closing or not self._others(client):
                    raise
                moved = True
                log.warning("request %s is moved from replica %d, which died", request.id, number)
            finally:
                self._balance.give_back(number, cost)
                self._owners.pop(request.id, None)

    @property
    def dead(self) -> str | None:
        """Why no replica is left; None if one is."""
        return None if any(client.dead is None for client in self._clients) else self._clients[0].dead

    def _alive(self) -> list[int]:
        """Return the numbers of the replicas that can compute. Raise EngineDeadError if there is none."""
        alive = [number for number, client in enumerate(self._clients) if client.dead is None]
        if not alive:
            raise EngineDeadError(f"No replica of the engine is left. {self._clients[0].dead}")
        return alive

    def _others(self, client: CoreClient) -> bool:
        return any(other is not client and other.dead is None for other in self._clients)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        number = self._owners.get(request_id)
        if number is not None:
            await self._clients[number].abort(request_id, index)

    async def reset_prefix_cache(self) -> None:
        await self._all(lambda client: client.reset_prefix_cache())

    async def pause(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        await self._all(lambda client: client.pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._all(lambda client: client.resume())

    async def sleep(self, level: int, mode: PauseMode) -> None:
        await self._all(lambda client: client.sleep(level, mode))

    async def wake_up(self, parts: Iterable[SleepTag]) -> None:
        given = list(parts)
        await self._all(lambda client: client.wake_up(given))

    async def abort_named(self, names: Iterable[str] | None) -> int:
        given = None if names is None else list(names)
        return sum(await self._all(lambda client: client.abort_named(given)))

    async def start_profile(self, prefix: str = "") -> None:
        """Profile the first replica."""
        await self._first.start_profile(prefix)

    async def stop_profile(self) -> str:
        return await self._first.stop_profile()

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
        def update(client: CoreClient) -> Coroutine[Any, Any, dict[str, Any]]:
            return client.update_weights(
                path, load_format, received=received, mode=mode, flush_cache=flush_cache, version=version
            )

        found = await self._all(update, "the weights were replaced since the start")
        return found[0] | {"num_paused_requests": sum(one.get("num_paused_requests", 0) for one in found)}

    async def begin_weights(self) -> None:
        await self._all(lambda client: client.begin_weights(), "an update of the weights has begun since the start")

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        await self._all(lambda client: client.receive_weights(update_info))

    async def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        """Call the feature in all replicas; return the first one's result."""
        return (await self._all(lambda client: client.call(feature, method, args)))[0]

    @property
    def _first(self) -> CoreClient:
        return self._clients[self._alive()[0]]

    async def _all(self, command: Callable[[CoreClient], Coroutine[Any, Any, T]], change: str = "") -> list[T]:
        """Run a command in all replicas that live; return their results, or raise the first error.

        Args:
            change: why a replica that starts later would differ from the others; "" if it would not, or if statistics
                show it.

        Raises:
            EngineStateError: some replicas executed it, and others that live did not.
        """
        numbers = self._alive()
        clients = [self._clients[number] for number in numbers]
        self._commands += 1
        try:
            found = await asyncio.gather(*(command(client) for client in clients), return_exceptions=True)
        except asyncio.CancelledError:
            self._changed = change or self._changed  # it is executed all the same
            raise
        finally:
            self._commands -= 1
        if any(not _refused(client, one) for client, one in zip(clients, found, strict=True)):
            self._changed = change or self._changed
        errors = {n: one for n, one in zip(numbers, found, strict=True) if isinstance(one, BaseException)}
        if errors:
            self._check_alike(numbers, errors)
            raise next(iter(errors.values()))
        return [one for one in found if not isinstance(one, BaseException)]

    def _check_alike(self, numbers: Sequence[int], errors: Mapping[int, BaseException]) -> None:
        """Raise EngineStateError if some replicas executed a command that others, which live, did not."""
        done = next((number for number in numbers if number not in errors), None)
        odd = next((number for number in errors if self._clients[number].dead is None), None)
        if done is None or odd is None:
            return
        text = f"Replica {odd} failed what replica {done} has done, so that they differ: {errors[odd]}"
        log.error("%s", text)
        raise EngineStateError(f"{text} Repeat it until all have done it, or undo it.") from errors[odd]

    def stats(self) -> EngineStats:
        """Return the sums over the replicas, with the counters of those that were replaced: counters only grow."""
        return summed([*(client.stats() for client in self._clients), self._replaced])

    @property
    def replicas(self) -> list[CoreClient]:
        return list(self._clients)

    def health(self) -> Health:
        """Return the health of the replicas: good while one can compute, final once none will be started again."""
        found = [client.health() for client in self._clients]
        best = min(found, key=lambda health: (not health.ok, health.final))
        final = self._closing or len(self._given_up) == len(found)
        return best if best.ok else msgspec.structs.replace(best, final=final)

    def received(self, request_id: str) -> Received:
        number = self._owners.get(request_id)
        return Received() if number is None else self._clients[number].received(request_id)

    def kill(self) -> None:
        """Kill all cores. Open streams end with EngineDeadError."""
        self._closing = True
        self._watching.cancel()
        for task in self._tasks:
            task.cancel()
        for client in self._clients:
            client.kill()

    async def close(self) -> None:
        """Stop all cores and wait for their end."""
        self._closing = True
        for task in (self._watching, *self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _watch(self) -> None:
        """End replicas that hang, and start those again that have died."""
        looks_stopped = [0] * len(self._clients)
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, client in enumerate(self._clients):
                looks_stopped[number] = looks_stopped[number] + 1 if client.stopped else 0
                if client.dead is None and (why := _hanging(client, looks_stopped[number])):
                    log.error("replica %d is ended: %s", number, why)
                    await client.end(f"Replica {number} was ended: {why}")
                if client.dead is None or self._commands or number in self._starting or number in self._given_up:
                    continue
                if (reason := self._reason_against(number)) is not None:
                    log.error("replica %d has died and is not started again: %s", number, reason)
                    self._given_up.add(number)
                    continue
                self._starting.add(number)
                task = asyncio.create_task(self._restart(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _reason_against(self, number: int) -> str | None:
        if why := self._changed or self._difference(number):
            return f"{why}, so that it would differ from the others; restart the server"
        times = self._restarts[number]
        if len(times) == _MOST_RESTARTS and time.monotonic() - times[0] < _WITHIN_S:
            return f"it was started again {_MOST_RESTARTS} times in the last {_WITHIN_S / 60:.0f} minutes"
        return None

    def _difference(self, number: int) -> str:
        """Return how a replica that starts now would differ from those that live, or from the former one if none does;
        "" if it would not."""
        living = [client.stats() for client in self._clients if client.dead is None]
        for stats in living or [self._clients[number].stats()]:
            if stats.paused:
                return "the engine is paused" if stats.sleep_level == AWAKE else "the engine sleeps"
            if stats.feature_changed:
                return f"calls have changed {stats.feature_changed} since the start"
        return ""

    async def _restart(self, number: int) -> None:
        log.warning("replica %d has died and is started again: %s", number, self._clients[number].dead)
        self._restarts[number].append(time.monotonic())
        try:
            await self._clients[number].close()
            begun = await self._start(number)
            if await self._is_alike(number, begun):
                self._replaced = summed([self._replaced, self._clients[number].stats().counters()])
                self._clients[number] = begun
                self._balance.forget(number)
                log.warning("replica %d is back", number)
        except (OctavoError, OSError) as error:
            log.error("replica %d could not be started again: %s", number, error)
        finally:
            self._starting.discard(number)

    async def _is_alike(self, number: int, begun: CoreClient) -> bool:
        """Return whether a replica that has just started equals the others; close it if it does not.

        Commands that were executed while it started, which takes minutes, have not reached it. After a return of True
        it is among the replicas before another one can begin.
        """
        try:
            while self._commands:
                await asyncio.sleep(_QUIET_S)
            if not (self._changed or self._difference(number)):
                return True
        except asyncio.CancelledError:
            await begun.close()
            raise
        log.warning("replica %d has started, but the others were changed meanwhile; it is ended", number)
        await begun.close()
        return False


def _refused(client: CoreClient, outcome: object) -> bool:
    """Whether a command had no effect on a replica: it was refused, or the replica died.

    A command that a bug ended may have had some; its error is of the same class as that of a dead replica.
    """
    if isinstance(outcome, EngineDeadError):
        return client.dead is not None
    return isinstance(outcome, OctavoError)


def _hanging(client: CoreClient, looks_stopped: int) -> str:
    """Return why a replica counts as hanging; "" if it does not.

    One that executes a command makes no progress meanwhile, such as while it replaces its weights or wakes up.

    Args:
        looks_stopped: successive looks at which its process was stopped. They are counted, not timed: this process may
            have stood still as well.
    """
    if looks_stopped > _MOST_LOOKS:
        return "its process was stopped by a signal (SIGSTOP)."
    health = client.health()
    return "" if health.ok or health.final or client.commanded else health.reason


_GREATEST = ("block_size", "last_step_s", "paused", "sleep_level")


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of several engines as those of one."""
    if len(stats) == 1:
        return stats[0]
    found: dict[str, Any] = {}
    for name in EngineStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name in _GREATEST:
            found[name] = max(values)
        elif isinstance(values[0], str):
            found[name] = next((value for value in values if value), "")
        elif name == "features":
            found[name] = _features(values)
        elif isinstance(values[0], dict):
            found[name] = {key: value for one in values for key, value in one.items()}
        elif isinstance(values[0], list):
            found[name] = [sum(column) for column in zip(*values, strict=True)]
        else:
            found[name] = sum(values)
    return EngineStats(**found)


def _features(each: Iterable[list[FeatureMetric]]) -> list[FeatureMetric]:
    merged: dict[str, FeatureMetric] = {}
    for metrics in each:
        for one in metrics:
            sums = dict(merged[one.name].values) if one.name in merged else {}
            for key, value in one.values.items():
                sums[key] = sums.get(key, 0.0) + value
            merged[one.name] = msgspec.structs.replace(one, values=sums)
    return list(merged.values())
