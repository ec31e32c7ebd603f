"""`Pool`: loads and evicts the models' processes as `Seats` decides, and lets requests in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.pool.child import Child, ChildError
from octavo.pool.seats import Admission, Seat, Seats, Standing
from octavo.pool.settings import ModelEntry, PoolConfig
from octavo.server.errors import ApiError

logger = logging.getLogger("octavo.server")

_WATCH_S = 5.0
_HUNG_S = 30.0
_LONGEST_REST_S = 60.0


class Launcher(Protocol):
    """Starts a model's process."""

    def __call__(self, entry: ModelEntry) -> Awaitable[Child]:
        """Return the process once it is ready. Raise ChildError if it ended before."""
        ...


@dataclass(slots=True, eq=False)
class Member:
    """One model.

    Attributes:
        child: its process; None if it has none that is ready.
        asleep: the process sleeps.
        reason: why its last process could not be started or ended by itself; "" if neither.
        failures: starts that failed, one after the other.
        rests_until: until then it is not started again.
        trouble: why its process is not healthy; "" if it is.
    """

    entry: ModelEntry
    seat: Seat
    child: Child | None = None
    asleep: bool = False
    reason: str = ""
    failures: int = 0
    rests_until: float = 0.0
    trouble: str = ""

    @property
    def name(self) -> str:
        return self.entry.name

    async def told(self, url: str) -> bytes | None:
        """Return the process's answer to a GET; None if no process runs, or it does not answer soon with 200."""
        return None if self.child is None or self.child.ended.is_set() else await self.child.told(url)

    @property
    def state(self) -> str:
        """The model's state in `/v1/models` and others: loaded, asleep, loading, unloading or unloaded."""
        match self.seat.standing:
            case Standing.LOADING:
                return "loading"
            case Standing.GOING:
                return "unloading"
            case Standing.OUT:
                return "asleep" if self.asleep else "unloaded"
        return "loaded"


class Lease:
    """A request that was let in: its model stays loaded until `release`."""

    def __init__(self, member: Member, child: Child, release: Callable[[], None]) -> None:
        self.member = member
        self.child = child
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """End the request. May be called again."""
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass(slots=True)
class Counts:
    """What happened so far, by model."""

    loads: Counter[str] = field(default_factory=Counter)
    wakes: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    load_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Pool:
    """All models. `close` ends their processes.

    Args:
        launch: starts a process.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        config: PoolConfig,
        launch: Launcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [entry.name for entry in entries]
        self.seats = Seats(
            names, config.max_loaded_models, config.min_model_turn_s, config.model_idle_timeout_s or None
        )
        self.members = {entry.name: Member(entry, self.seats.seats[entry.name]) for entry in entries}
        self.counts = Counts()
        self.closing = False
        self._config = config
        self._launch = launch
        self._clock = clock
        self._waiters: dict[int, asyncio.Future[int]] = {}
        self._loading: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, member: Member) -> Lease:
        """Let a request in, once its model is loaded.

        Raises:
            ApiError: 503, the model can't be loaded, or was not in time; 429, too many requests wait for it.
        """
        seat = member.seat
        self._check(member)
        ticket = self.seats.arrive(member.name, self._clock())
        self._decide()
        life = seat.life if ticket is None else await self._admitted(member, ticket)
        if member.child is None or seat.life != life:
            raise lost(member)

        def release() -> None:
            self.seats.leave(member.name, life, self._clock())
            self._decide()

        return Lease(member, member.child, release)

    def retry_after(self, member: Member) -> int:
        """Return after how many seconds a client may try again."""
        return max(1, math.ceil(member.seat.cost))

    async def preload(self) -> None:
        """Load models in their order, as many as may be loaded. What fails is logged."""
        for member in list(self.members.values())[: self._config.max_loaded_models]:
            with contextlib.suppress(ApiError):
                (await self.acquire(member)).release()

    async def watch(self) -> None:
        """Ask the loaded models for their health, forever. One that is in trouble for long is ended."""
        since: dict[str, float] = {}
        while True:
            await asyncio.sleep(_WATCH_S)
            for member in self.members.values():
                child = member.child
                if child is None or member.asleep or member.state == "loading":
                    since.pop(member.name, None)
                    continue
                member.trouble = await child.trouble(member.entry.server.stall_after_s)
                if not member.trouble or child is not member.child:
                    since.pop(member.name, None)
                elif self._clock() - since.setdefault(member.name, self._clock()) > _HUNG_S:
                    logger.error("%s is stopped, since it is not healthy: %s", member.name, member.trouble)
                    await child.kill()

    async def close(self) -> None:
        """Refuse what waits, and end all processes."""
        self.closing = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiters.values():
            if not future.done():
                future.set_exception(_closing())
        children = [member.child for member in self.members.values() if member.child is not None]
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*(child.stop() for child in children))
        while tasks := self._tasks | self._loading:
            await asyncio.wait(tasks)

    def _check(self, member: Member) -> None:
        if self.closing:
            raise _closing()
        left = member.rests_until - self._clock()
        if member.seat.standing is Standing.OUT and left > 0:
            self.counts.refused[member.name] += 1
            raise _failed(member, math.ceil(left))
        most = member.entry.server.max_num_queued_reqs
        if most is not None and member.seat.standing is not Standing.IN and len(member.seat.waiting) >= most:
            self.counts.refused[member.name] += 1
            raise ApiError(
                429,
                f"{most} requests wait for the model {member.name} to be loaded, as many as --max-num-queued-reqs "
                "allows; try again later.",
                headers={"Retry-After": str(self.retry_after(member))},
            )

    async def _admitted(self, member: Member, ticket: int) -> int:
        """Wait until a ticket is let in. Return the model's life. A request that gives up leaves nothing behind."""
        future = self._waiter(ticket)
        try:
            async with asyncio.timeout(self._config.model_wait_timeout_s):
                return await future
        except BaseException as exc:
            if future.done() and not future.cancelled() and future.exception() is None:  # let in at the last moment
                self.seats.leave(member.name, future.result(), self._clock())
            self.seats.withdraw(member.name, ticket)
            self._decide()
            if isinstance(exc, TimeoutError):
                self.counts.refused[member.name] += 1
                raise self._late(member) from None
            raise
        finally:
            del self._waiters[ticket]

    def _waiter(self, ticket: int) -> asyncio.Future[int]:
        """Return the future of a ticket, which may be let in before its request begins to wait."""
        return self._waiters.setdefault(ticket, asyncio.get_running_loop().create_future())

    def _late(self, member: Member) -> ApiError:
        return ApiError(
            503,
            f"The model {member.name} was not loaded within {self._config.model_wait_timeout_s:g} s "
            f"(--model-wait-timeout): it is {member.state}, and other models are in use. Try again later.",
            headers={"Retry-After": str(max(10, self.retry_after(member)))},
        )

    def _decide(self) -> None:
        if self.closing:
            return
        now = self._clock()
        decision = self.seats.decide(now)
        self._let_in(decision.let_in)
        for name in decision.load:
            self._run(self._load(self.members[name]), self._loading)
        for name in decision.evict:
            self._run(self._evict(self.members[name]))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if decision.again_at is not None:
            self._timer = asyncio.get_running_loop().call_later(decision.again_at - now, self._decide)

    def _run(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _let_in(self, admissions: Sequence[Admission]) -> None:
        for ticket, life in admissions:
            future = self._waiter(ticket)
            if not future.done():
                future.set_result(life)

    async def _load(self, member: Member) -> None:
        began = self._clock()
        wakes = member.asleep
        try:
            child = await self._woken(member) if wakes else None
            wakes = child is not None
            member.child = child or await self._launch(member.entry)
        except (ChildError, OSError) as exc:
            self._note_failure(member, str(exc))
            return
        except Exception:
            logger.exception("%s could not be loaded.", member.name)
            self._note_failure(member, "could not be started.")
            return
        seconds = self._clock() - began
        member.asleep, member.failures, member.reason, member.trouble = False, 0, "", ""
        self.counts.wakes[member.name] += wakes
        self.counts.loads[member.name] += not wakes
        self.counts.load_s[member.name] += seconds
        logger.info("%s %s in %.1f s.", member.name, "woke up" if wakes else "was loaded", seconds)
        if not wakes:
            self._run(self._mind(member, member.child))
        self._let_in(self.seats.loaded(member.name, self._clock(), seconds))
        self._decide()

    async def _woken(self, member: Member) -> Child | None:
        """Wake a sleeping process. Return None if that failed: it is stopped, and another one can be started."""
        child = member.child
        if child is None:
            return None
        try:
            await child.command("wake_up")
        except ChildError as exc:
            logger.warning("%s could not be woken up and is loaded again: %s", member.name, exc)
            member.child, member.asleep = None, False
            await child.stop()
            return None
        return child

    def _note_failure(self, member: Member, reason: str) -> None:
        self.counts.failures[member.name] += 1
        member.child, member.asleep, member.reason = None, False, reason.rstrip(".")
        member.failures += 1
        rest_s = min(_LONGEST_REST_S, 2.0**member.failures)
        member.rests_until = self._clock() + rest_s
        logger.error("%s could not be loaded: its process %s.", member.name, member.reason)
        for ticket in self.seats.failed(member.name):
            future = self._waiter(ticket)
            if not future.done():
                future.set_exception(_failed(member, math.ceil(rest_s)))
        self._decide()

    async def _evict(self, member: Member) -> None:
        """Free a model's memory, once it computes nothing."""
        child, began = member.child, self._clock()
        if child is not None:
            await child.drained()
        if child is not None and not child.ended.is_set() and self._sleeps(child) and await self._put_to_sleep(member):
            logger.info("%s fell asleep in %.1f s.", member.name, self._clock() - began)
        elif child is not None and member.child is child:
            member.child = None
            await child.stop()
            logger.info("%s was unloaded in %.1f s.", member.name, self._clock() - began)
        self.counts.evictions[member.name] += 1
        self.seats.gone(member.name)
        await self._stop_excess_sleepers()
        self._decide()

    def _sleeps(self, child: Child) -> bool:
        how = self._config.model_eviction
        sleeps = child.facts.accelerator != "cpu" if how == "auto" else how == "sleep"
        return sleeps and self._config.max_sleeping_models > 0

    async def _put_to_sleep(self, member: Member) -> bool:
        assert member.child is not None
        try:
            await member.child.command("sleep")
        except ChildError as exc:
            logger.warning("%s can't sleep and is stopped: %s", member.name, exc)
            return False
        member.asleep = member.child is not None
        return member.asleep

    async def _stop_excess_sleepers(self) -> None:
        sleepers = [one for one in self.members.values() if one.asleep and one.seat.standing is Standing.OUT]
        sleepers.sort(key=lambda one: one.seat.used)
        for member in sleepers[: max(0, len(sleepers) - self._config.max_sleeping_models)]:
            child, member.child, member.asleep = member.child, None, False
            if child is not None:
                await child.stop()
                logger.info("%s was unloaded: --max-sleeping-models others sleep.", member.name)

    async def _mind(self, member: Member, child: Child) -> None:
        """Wait for a process's end. If it ends by itself, its next request starts another one."""
        await child.ended.wait()
        if member.child is not child or self.closing:
            return
        member.child, member.reason = None, child.how_ended().rstrip(".")
        self.counts.deaths[member.name] += 1
        logger.error(
            "The process of %s %s. Its requests are lost; the next one starts it again.", member.name, member.reason
        )
        was_asleep, member.asleep = member.asleep, False
        if not was_asleep and member.seat.standing in (Standing.IN, Standing.CLOSED):
            self.seats.gone(member.name)
        self._decide()


def _closing() -> ApiError:
    return ApiError(503, "The server is shutting down and takes no new requests.", headers={"Retry-After": "5"})


def lost(member: Member) -> ApiError:
    """Return the error of a request whose model's process has ended."""
    how = member.reason or "has ended"
    return ApiError(
        503,
        f"The request is lost, since the process of the model {member.name} {how}. Send it again: that starts another.",
        headers={"Retry-After": "1"},
    )


def _failed(member: Member, seconds: int) -> ApiError:
    return ApiError(
        503,
        f"The model {member.name} can't be loaded: its process {member.reason}. The log has more. Try "
        f"again in {seconds} s.",
        headers={"Retry-After": str(seconds)},
    )


def running(members: Iterable[Member]) -> list[Member]:
    """Return the models whose process runs, also asleep: its API answers."""
    return [member for member in members if member.child is not None and not member.child.ended.is_set()]
