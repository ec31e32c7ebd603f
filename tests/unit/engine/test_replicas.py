"""Several cores behind one client: where requests go, and what becomes of those of a core that dies."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

import pytest

from octavo.core.errors import EngineDeadError, EngineStateError, InvalidRequestError, UnsupportedError
from octavo.core.info import Health
from octavo.core.output import TokenDelta
from octavo.core.params import SamplingParams
from octavo.core.pausing import PauseMode
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats, FeatureMetric
from octavo.engine.balance import Balance
from octavo.engine.client import CoreClient
from octavo.engine.fake import fake_info
from octavo.engine.process import CoreProcess
from octavo.engine.replicas import ReplicaClient, _hanging, summed
from octavo.engine.stub import Stub

P = ParamSpec("P")
LONG = list(range(1000))


def asking(name: str, tokens: list[int], max_tokens: int = 4, **more: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(id=name, tokens=tokens, params=params, **more)  # type: ignore[arg-type]


def test_the_replica_with_the_fewest_open_tokens_is_chosen() -> None:
    balance = Balance(3)
    taken = [balance.take(asking(str(i), [i] * size), range(3)) for i, size in enumerate([50, 20, 10, 10, 5])]
    assert [number for number, _ in taken] == [0, 1, 2, 2, 1]
    balance.give_back(*taken[0])
    assert balance.take(asking("x", [7]), range(3))[0] == 0
    assert balance.take(asking("y", [7]), [2])[0] == 2, "only living ones"


def test_a_known_prompt_goes_where_it_is_known_unless_that_costs_more_than_it_saves() -> None:
    balance = Balance(2)
    first, cost = balance.take(asking("a", LONG), range(2))
    balance.give_back(first, cost)
    again, less = balance.take(asking("b", [*LONG, 5]), range(2))
    assert again == first
    assert less == cost - 960 + 1, "its first 15 chunks of 64 tokens are known"
    assert balance.take(asking("c", LONG, namespace="other"), range(2))[0] != first
    balance.loads[first] += 2000
    assert balance.take(asking("d", LONG), range(2))[0] != first
    balance.loads = [0, 0]
    balance.forget(0)
    balance.forget(1)
    assert balance.take(asking("e", LONG), range(2)) == (0, cost)


def test_statistics_are_sums() -> None:
    def metric(value: float) -> FeatureMetric:
        return FeatureMetric("found", "counter", "", "kind", {"a": value})

    stats = [EngineStats(num_running=i, block_size=16, waits={str(i): "x"}, features=[metric(i)]) for i in (1, 2)]
    found = summed(stats)
    assert (found.num_running, found.block_size, found.waits) == (3, 16, {"1": "x", "2": "x"})
    assert found.features == [metric(3)]
    assert found.steps_by_tokens == [0] * len(stats[0].steps_by_tokens)
    assert found.weight_version == "default"


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a coroutine as a test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def replicas(step_s: float = 0.001) -> AsyncIterator[tuple[ReplicaClient, list[CoreProcess]]]:
    """Two replicas without a model, and their processes, to which restarts add."""
    made: list[CoreProcess] = []

    async def start(number: int) -> CoreClient:
        info = fake_info(name="stub", vocab_size=257, eos_token_ids=[], max_model_len=100_000)
        made.append(CoreProcess("octavo.engine.stub", Stub(info, (7, 8), step_s)))
        return await CoreClient.start(made[-1])

    client = await ReplicaClient.start(start, 2)
    try:
        yield client, made
    finally:
        await client.close()
        assert not any(process.alive for process in made)


async def tokens_of(client: ReplicaClient, request: GenerateRequest) -> list[int]:
    return [token async for delta in client.generate(request) for token in delta.tokens]


async def drained(stream: AsyncIterator[TokenDelta]) -> None:
    async for _ in stream:
        pass


@in_loop
async def test_requests_are_spread_and_counted() -> None:
    async with replicas() as (client, _):
        found = await asyncio.gather(*(tokens_of(client, asking(str(i), [i] * 20)) for i in range(8)))
        assert found == [[7, 8, 7, 8]] * 8
        assert [one.stats().prompt_tokens for one in client.replicas] == [80, 80]
        assert client.stats().prompt_tokens == 160
        assert client._balance.loads == [0, 0]
        assert client.health().ok


@pytest.mark.parametrize(
    ("blow", "said"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, r"stopped by a signal \(SIGSTOP\)")]
)
@in_loop
async def test_what_a_lost_replica_had_begun_ends_and_the_rest_is_moved(blow: signal.Signals, said: str) -> None:
    async with replicas(step_s=0.01) as (client, made):
        begun = [client.generate(asking(str(i), [i], max_tokens=10**6)) for i in range(2)]
        for stream in begun:
            await anext(stream)
        fresh = asyncio.create_task(tokens_of(client, asking("fresh", [3])))
        await asyncio.sleep(0)  # it is at replica 0 now
        os.kill(made[0].pid, blow)
        with pytest.raises(EngineDeadError, match=said):
            await drained(begun[0])
        assert await fresh == [7, 8, 7, 8]
        assert (await anext(begun[1])).tokens
        assert client.health().ok
        await begun[1].aclose()


@in_loop
async def test_a_request_that_kills_replicas_does_not_reach_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mortal(Told):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta]:
            self.death = "killed"
            raise EngineDeadError("The engine core was killed by SIGSEGV.")
            yield

    made = [Mortal() for _ in range(4)]

    async def start(number: int) -> CoreClient:
        return made[number]

    client = await ReplicaClient.start(start, 4)
    monkeypatch.setattr(client, "_reason_against", lambda number: "no more")
    with pytest.raises(EngineDeadError, match="SIGSEGV"):
        await tokens_of(client, asking("deadly", [3]))
    assert [one.dead for one in made] == ["killed", "killed", None, None]
    await client.close()


async def until(client: ReplicaClient, living: int) -> None:
    async with asyncio.timeout(60):
        while sum(one.dead is None for one in client._clients) != living or client._starting:
            await asyncio.sleep(0.01)


@in_loop
async def test_a_name_in_use_is_refused_whichever_replica_would_get_it() -> None:
    async with replicas(step_s=0.01) as (client, _):
        first = client.generate(asking("x", [1], max_tokens=10**6))
        await anext(first)
        with pytest.raises(InvalidRequestError, match="request_id is in use"):
            await tokens_of(client, asking("x", [2]))
        assert client._owners == {"x": 0}
        await first.aclose()
        assert not client._owners


@in_loop
async def test_a_dead_replica_counts_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else limits of queues would count them for ever."""
    async with replicas(step_s=0.01) as (client, made):
        one = client._clients[0]
        monkeypatch.setattr(client, "_reason_against", lambda number: "no more")
        one._stats = EngineStats(num_running=3, num_waiting=9, waits={"x": "y"}, num_blocks_used=5, num_steps=7)
        os.kill(made[0].pid, signal.SIGKILL)
        await until(client, 1)
        found = client.replicas[0].stats()
        assert (found.num_running, found.num_waiting, found.num_blocks_used, found.waits) == (0, 0, 0, {})
        assert found.num_steps == 7, "counters stay"
        assert client.stats().num_waiting == 0


@in_loop
async def test_a_dead_replica_is_started_again() -> None:
    async with replicas() as (client, made):
        os.kill(made[1].pid, signal.SIGKILL)
        await until(client, 1)
        await until(client, 2)
        assert len(made) == 3
        assert await tokens_of(client, asking("x", [3])) == [7, 8, 7, 8]


@in_loop
async def test_counters_include_those_of_replaced_replicas() -> None:
    """Else a rate between two snapshots, as in the log, is negative."""
    metrics = [FeatureMetric("found", "counter", "", "", {"": 3.0}), FeatureMetric("held", "gauge", "", "", {"": 4.0})]
    async with replicas() as (client, made):
        client._clients[1]._stats = EngineStats(generation_tokens=50, num_blocks=8, last_step_s=9.0, features=metrics)
        os.kill(made[1].pid, signal.SIGKILL)
        await until(client, 1)
        await until(client, 2)
        found = client.stats()
        assert (found.generation_tokens, found.num_blocks, found.last_step_s) == (50, 0, 0.0)
        assert found.features == metrics[:1]
        assert client.replicas[1].stats().generation_tokens == 0


@in_loop
async def test_a_replica_that_makes_no_progress_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as (client, made):
        stuck = client._clients[1]
        monkeypatch.setattr(stuck, "health", lambda: Health(ok=False, reason="no step has completed"))
        async with asyncio.timeout(60):
            while client._clients[1] is stuck:
                await asyncio.sleep(0.01)
        assert stuck.dead == "Replica 1 was ended: no step has completed"
        assert not made[1].alive
        assert await tokens_of(client, asking("x", [3])) == [7, 8, 7, 8]


@in_loop
async def test_a_replica_that_executes_a_command_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with replicas() as (client, made):
        busy = client._clients[1]
        monkeypatch.setattr(busy, "health", lambda: Health(ok=False, reason="no step has completed"))
        os.kill(made[1].pid, signal.SIGSTOP)  # so that it does not answer yet
        command = asyncio.create_task(busy.stop_profile())
        await asyncio.sleep(0)
        assert _hanging(busy, looks_stopped=0) == ""
        os.kill(made[1].pid, signal.SIGCONT)
        await command
        assert _hanging(busy, looks_stopped=0) == "no step has completed"


class Told(CoreClient):
    """A client of no core: commands succeed, or fail with `error`, and its statistics are what the test sets."""

    info = fake_info()
    commanded = stopped = False
    slow_readers = 0

    def __init__(self) -> None:
        self.current = EngineStats()
        self.error: Exception | None = None
        self.death: str | None = None
        self.closed = False

    @property
    def dead(self) -> str | None:
        return self.death

    def stats(self) -> EngineStats:
        return self.current

    def health(self) -> Health:
        return Health(ok=self.death is None, final=self.death is not None)

    async def _call(self, command: object) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {}

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def two_told() -> AsyncIterator[tuple[ReplicaClient, list[Told]]]:
    made = [Told(), Told()]

    async def start(number: int) -> CoreClient:
        return made[number]

    client = await ReplicaClient.start(start, 2)
    try:
        yield client, made
    finally:
        await client.close()


COMMANDS: dict[str, Callable[[ReplicaClient], Coroutine[Any, Any, Any]]] = {
    "weights": lambda client: client.update_weights("new"),
    "pause": lambda client: client.pause(PauseMode.KEEP),
    "sleep": lambda client: client.sleep(1, PauseMode.ABORT),
    "call": lambda client: client.call("some", "list", {}),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@in_loop
async def test_a_command_that_was_refused_sets_no_replica_apart(
    command: Callable[[ReplicaClient], Coroutine[Any, Any, Any]],
) -> None:
    async with two_told() as (client, made):
        for one in made:
            one.error = UnsupportedError("no")
        with pytest.raises(UnsupportedError):
            await command(client)
        assert client._reason_against(1) is None


@pytest.mark.parametrize(
    ("one", "other", "kept"),
    [
        (None, None, False),
        (None, UnsupportedError("no"), False),
        (EngineDeadError("The engine core failed at this: a bug"), UnsupportedError("no"), False),
        (UnsupportedError("no"), UnsupportedError("no"), True),
    ],
)
@in_loop
async def test_weights_that_any_replica_may_have_replaced_do(
    one: Exception | None, other: Exception | None, kept: bool
) -> None:
    async with two_told() as (client, made):
        made[0].error, made[1].error = one, other
        await asyncio.gather(client.update_weights("new"), return_exceptions=True)
        assert (client._reason_against(1) is None) == kept


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@in_loop
async def test_replicas_that_differ_after_a_command_are_named(
    command: Callable[[ReplicaClient], Coroutine[Any, Any, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that has died: it is started again, or never serves."""
    said = "Replica 1 failed what replica 0 has done, so that they differ: no memory. Repeat it until all have done it"
    async with two_told() as (client, made):
        made[1].error = UnsupportedError("no memory.")
        with pytest.raises(EngineStateError, match=said):
            await command(client)
        assert "Replica 1 failed" in caplog.text

        async def dies(command: object) -> dict[str, Any]:
            made[1].death = "killed"
            raise EngineDeadError("killed")

        monkeypatch.setattr(made[1], "_call", dies)
        with pytest.raises(EngineDeadError, match="killed"):
            await command(client)


@pytest.mark.parametrize(
    ("stats", "reason"),
    [
        (EngineStats(), None),
        (EngineStats(paused=True), "the engine is paused"),
        (EngineStats(paused=True, sleep_level=1), "the engine sleeps"),
        (EngineStats(feature_changed="some"), "calls have changed some"),
    ],
)
@in_loop
async def test_what_the_living_replicas_have_become_sets_a_new_one_apart(
    stats: EngineStats, reason: str | None
) -> None:
    async with two_told() as (client, made):
        made[1].death, made[1].current = "killed", EngineStats(paused=True)
        made[0].current = stats
        found = client._reason_against(1)
        assert found is None if reason is None else str(found).startswith(reason)


@in_loop
async def test_a_replica_is_not_started_while_a_command_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.engine.replicas._LOOK_S", 0)
    async with two_told() as (client, made):
        gate = asyncio.Event()
        monkeypatch.setattr(made[0], "_call", lambda command: gate.wait())
        command = asyncio.create_task(client.resume())
        await asyncio.sleep(0)
        made[1].death = "killed"
        for _ in range(50):
            await asyncio.sleep(0)
        assert not client._restarts[1]
        gate.set()
        await command
        async with asyncio.timeout(60):
            while not client._restarts[1]:
                await asyncio.sleep(0)


@in_loop
async def test_the_end_is_not_final_while_a_replica_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server would end as soon as all have died at once."""
    monkeypatch.setattr("octavo.engine.replicas._LOOK_S", 0)
    async with two_told() as (client, made):
        for one in made:
            one.death = "killed"
        assert client.health() == Health(ok=False, final=False)
        client._restarts[0].extend([time.monotonic()] * 3)
        client._restarts[1].extend([time.monotonic()] * 3)
        async with asyncio.timeout(60):
            while not client.health().final:
                await asyncio.sleep(0)


@in_loop
async def test_a_replica_that_hangs_counts_before_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_told() as (client, made):
        made[0].death = "killed"
        client._given_up.add(0)
        monkeypatch.setattr(made[1], "health", lambda: Health(ok=False, reason="no step has completed"))
        assert client.health() == Health(ok=False, reason="no step has completed")


@pytest.mark.parametrize("command", ["weights", "pause", "none"])
@in_loop
async def test_a_replica_that_missed_a_command_while_it_started_is_ended(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.replicas._LOOK_S", 0)
    monkeypatch.setattr("octavo.engine.replicas._QUIET_S", 0)
    async with two_told() as (client, made):
        loading, begun = asyncio.Event(), Told()

        async def start(number: int) -> CoreClient:
            await loading.wait()
            return begun

        client._start = start
        made[1].death = "killed"
        await started(client, 1)
        gate = asyncio.Event()
        monkeypatch.setattr(made[0], "_call", lambda command: gate.wait())
        running = asyncio.create_task(COMMANDS.get(command, COMMANDS["call"])(client))
        await asyncio.sleep(0)
        loading.set()
        for _ in range(50):
            await asyncio.sleep(0)
        assert client._clients[1] is made[1], "the command may change the others yet"
        made[0].current = EngineStats(paused=command == "pause")
        gate.set()
        await asyncio.wait({running})
        async with asyncio.timeout(60):
            while client._starting:
                await asyncio.sleep(0)
        assert begun.closed == (command != "none")
        assert client._clients[1] is (begun if command == "none" else made[1])


async def started(client: ReplicaClient, number: int) -> None:
    """Wait until a replica is being started."""
    async with asyncio.timeout(60):
        while number not in client._starting:
            await asyncio.sleep(0)


@in_loop
async def test_one_that_would_differ_stays_dead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas() as (client, made):
        monkeypatch.setattr(client._clients[0], "stats", lambda: EngineStats(paused=True))
        os.kill(made[1].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while "replica 1 has died and is not started again: the engine is paused" not in caplog.text:
                await asyncio.sleep(0.01)
        assert len(made) == 2
        assert client.dead is None
        os.kill(made[0].pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not client.health().final:
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="No replica of the engine is left"):
            await tokens_of(client, asking("x", [3]))
