"""The pool's loads, evictions and waits, over processes that only pretend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.pool.child import ChildError
from octavo.pool.child_main import Facts
from octavo.pool.pool import Lease, Pool
from octavo.pool.settings import ModelEntry, PoolConfig
from octavo.server.errors import ApiError


class FakeChild:
    """A process that does what a test says."""

    def __init__(self, name: str, accelerator: str) -> None:
        self.name = name
        self.facts = Facts(accelerator, 128, ["generate"])
        self.ended = asyncio.Event()
        self.background = asyncio.Event()
        self.background.set()
        self.commands: list[str] = []
        self.fails: set[str] = set()

    async def drained(self) -> None:
        await self.background.wait()

    async def command(self, name: str) -> None:
        self.commands.append(name)
        if name in self.fails:
            raise ChildError(f"{name} failed")

    async def stop(self) -> None:
        self.ended.set()

    def how_ended(self) -> str:
        return "was killed by SIGKILL"


class Stage:
    """A pool of fake processes. `failing` names models whose processes end before they are ready."""

    def __init__(self, names: str, accelerator: str = "cpu", max_num_queued_reqs: int | None = None, **config: Any):
        self.now = 0.0
        self.failing: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.children: list[Any] = []
        self.accelerator = accelerator
        server = ServerConfig(max_num_queued_reqs=max_num_queued_reqs)
        entries = [ModelEntry(names=(name,), added=(), engine=EngineConfig(), server=server) for name in names]
        self.pool = Pool(entries, PoolConfig(**config), self.launch, clock=lambda: self.now)

    async def launch(self, entry: ModelEntry) -> Any:
        await self.gate.wait()
        if entry.name in self.failing:
            raise ChildError("ended with exit status 1: no memory.")
        self.children.append(FakeChild(entry.name, self.accelerator))
        return self.children[-1]

    async def acquire(self, name: str) -> Lease:
        return await self.pool.acquire(self.pool.members[name])

    def asking(self, name: str) -> asyncio.Task[Lease]:
        return asyncio.create_task(self.acquire(name))

    def states(self) -> list[str]:
        return [member.state for member in self.pool.members.values()]


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


def played(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())


def test_requests_that_come_during_a_load_share_it() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        stage.gate.clear()
        tasks = [stage.asking("a") for _ in range(3)]
        await settle()
        assert stage.states() == ["loading", "unloaded"]
        stage.gate.set()
        leases = await asyncio.gather(*tasks)
        assert len({id(lease.child) for lease in leases}) == len(stage.children) == 1
        for lease in leases:
            lease.release()
            lease.release()
        assert stage.pool.members["a"].seat.running == 0
        await stage.pool.close()

    played(scenario)


@pytest.mark.parametrize(("accelerator", "state"), [("cpu", "unloaded"), ("cuda", "asleep")])
def test_an_idle_model_makes_room_and_returns(accelerator: str, state: str) -> None:
    async def scenario() -> None:
        stage = Stage("ab", accelerator)
        (await stage.acquire("a")).release()
        second = await stage.acquire("b")
        assert stage.states() == [state, "loaded"]
        second.release()
        (await stage.acquire("a")).release()
        first = stage.children[0]
        counts = stage.pool.counts
        if state == "asleep":
            assert first.commands == ["sleep", "wake_up"]
            assert (counts.loads["a"], counts.wakes["a"]) == (1, 1)
        else:
            assert first.ended.is_set()
            assert (counts.loads["a"], counts.wakes["a"]) == (2, 0)
        await stage.pool.close()
        assert all(child.ended.is_set() for child in stage.children)

    played(scenario)


def test_a_model_that_cannot_sleep_or_wake_up_is_started_again() -> None:
    async def scenario() -> None:
        stage = Stage("ab", "cuda")
        (await stage.acquire("a")).release()
        stage.children[0].fails = {"wake_up"}
        (await stage.acquire("b")).release()
        stage.children[1].fails = {"sleep"}
        (await stage.acquire("a")).release()
        assert [child.name for child in stage.children] == ["a", "b", "a"]
        assert stage.children[0].ended.is_set()
        assert stage.states() == ["loaded", "unloaded"]
        await stage.pool.close()

    played(scenario)


def test_only_so_many_models_sleep() -> None:
    async def scenario() -> None:
        stage = Stage("abcd", "cuda", max_sleeping_models=2)
        for name in "abcd":
            (await stage.acquire(name)).release()
        await settle()
        assert stage.states() == ["unloaded", "asleep", "asleep", "loaded"]
        await stage.pool.close()

    played(scenario)


def test_work_in_the_background_keeps_a_model() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        (await stage.acquire("a")).release()
        stage.children[0].background.clear()
        waiting = stage.asking("b")
        await settle()
        assert stage.states() == ["unloading", "unloaded"]
        assert not stage.children[0].ended.is_set()
        stage.children[0].background.set()
        (await waiting).release()
        assert stage.children[0].ended.is_set()
        await stage.pool.close()

    played(scenario)


def test_a_failed_load_is_told_to_all_and_not_repeated_at_once() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        stage.failing = {"a"}
        stage.gate.clear()
        tasks = [stage.asking("a") for _ in range(2)]
        await settle()
        stage.gate.set()
        for task in tasks:
            with pytest.raises(ApiError, match=r"ended with exit status 1: no memory\. The log has more") as caught:
                await task
            assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "2")
        stage.failing = set()
        with pytest.raises(ApiError, match="no memory"):
            await stage.acquire("a")
        (await stage.acquire("b")).release()
        stage.now = 3.0
        (await stage.acquire("a")).release()
        assert stage.pool.members["a"].reason == ""
        await stage.pool.close()

    played(scenario)


def test_a_wait_is_bounded_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        stage = Stage("ab", model_wait_timeout_s=0.01)
        lease = await stage.acquire("a")
        with pytest.raises(ApiError, match="--model-wait-timeout") as caught:
            await stage.acquire("b")
        assert caught.value.status == 503
        assert not stage.pool.members["b"].seat.waiting
        lease.release()
        assert stage.states() == ["loaded", "unloaded"]
        await stage.pool.close()

    played(scenario)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        stage.gate.clear()
        early, late = stage.asking("a"), stage.asking("a")
        await settle()
        early.cancel()
        await settle()
        stage.gate.set()
        lease = await late
        assert stage.pool.members["a"].seat.running == 1
        lease.release()
        (await stage.acquire("b")).release()
        await stage.pool.close()

    played(scenario)


def test_a_client_that_leaves_at_the_moment_of_its_admission_holds_no_lease() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        stage.gate.clear()
        task = stage.asking("a")
        await settle()
        stage.gate.set()
        while stage.pool.members["a"].state != "loaded":
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result().release()
        assert stage.pool.members["a"].seat.running == 0
        await stage.pool.close()

    played(scenario)


def test_a_process_that_dies_is_replaced_and_old_requests_do_not_count() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        old = await stage.acquire("a")
        stage.children[0].ended.set()
        await settle()
        assert stage.states() == ["unloaded", "unloaded"]
        assert stage.pool.members["a"].reason == "was killed by SIGKILL"
        new = await stage.acquire("a")
        old.release()
        assert stage.pool.members["a"].seat.running == 1
        new.release()
        await stage.pool.close()

    played(scenario)


def test_a_sleeping_process_that_dies_is_loaded_again() -> None:
    async def scenario() -> None:
        stage = Stage("ab", "cuda")
        (await stage.acquire("a")).release()
        held = await stage.acquire("b")
        stage.children[0].ended.set()
        await settle()
        assert stage.states() == ["unloaded", "loaded"]
        held.release()
        (await stage.acquire("a")).release()
        assert stage.pool.counts.loads["a"] == 2
        await stage.pool.close()

    played(scenario)


def test_only_so_many_requests_wait_for_a_model() -> None:
    async def scenario() -> None:
        stage = Stage("a", max_num_queued_reqs=1)
        stage.gate.clear()
        first = stage.asking("a")
        await settle()
        with pytest.raises(ApiError) as caught:
            await stage.acquire("a")
        assert caught.value.status == 429
        stage.gate.set()
        (await first).release()
        await stage.pool.close()

    played(scenario)


def test_a_closing_pool_refuses_what_waits_and_what_comes() -> None:
    async def scenario() -> None:
        stage = Stage("ab")
        lease = await stage.acquire("a")
        waiting = stage.asking("b")
        await settle()
        await stage.pool.close()
        for refused in (waiting, stage.asking("a")):
            with pytest.raises(ApiError, match="shutting down"):
                await refused
        lease.release()
        assert stage.children[0].ended.is_set()

    played(scenario)
