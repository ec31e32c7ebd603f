"""A lost device: every request, running, waiting or held by a pause, gets one error that says so."""

from __future__ import annotations

import asyncio

import pytest
from core_kit import Turnstile, ask, client_of, until

from octavo.cache.cache import KVCache
from octavo.core.errors import DeviceLostError, EngineDeadError
from octavo.core.output import FinishReason
from octavo.core.pausing import PauseMode
from octavo.engine.executor import FixedWorker
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.python_api.loop import SharedLoop
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

SAID = "The device was lost: toy device: it was told to break."


class Diagnosing(FixedWorker):
    def __init__(self, diagnose):
        self.loss = diagnose


def make_loop(device, *, depth=0, diagnose=lambda error: None):
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_ahead=depth + 1)
    return EngineLoop(
        Scheduler(KVCache(32, 4), limits, make_policy("fcfs")), device, depth, worker=Diagnosing(diagnose)
    )


async def end_of(client, request):
    """The tokens of a request, and the error that ends it."""
    tokens = []
    try:
        async for delta in client.generate(request):
            tokens += delta.tokens
            assert delta.finish is None
    except EngineDeadError as error:
        return tokens, str(error)
    raise AssertionError("it ended without an error")


def test_running_and_waiting_requests_are_told_once_and_the_core_ends(short_path, caplog):
    async def live():
        async with client_of(short_path, lost_at=6) as (client, process):
            ends = await asyncio.gather(*(end_of(client, ask(f"r{i}", max_tokens=50)) for i in range(40)))
            assert all(SAID in error for _, error in ends)
            assert any(tokens for tokens, _ in ends)
            assert not all(tokens for tokens, _ in ends), "some were to wait still"
            health = client.health()
            assert (health.ok, health.final) == (False, True)
            assert SAID in health.reason
            assert not client._report(was_well=True)
            assert (caplog.text.count("makes no progress"), process.stacks_shown) == (0, 0), "it is no stall"
            assert SAID in (await end_of(client, ask("later")))[1]
            with pytest.raises(EngineDeadError, match="toy device"):
                await client.pause(PauseMode.KEEP)
            await until(lambda: not process.alive)
            assert process.code == 70

    asyncio.run(live())


def test_a_front_end_that_reads_late_is_told_too(short_path, monkeypatch):
    """The core has ended before its last message is read."""
    monkeypatch.setattr("octavo.engine.core_server._LEAVE_S", 0.01)

    async def live():
        gate = Turnstile(3)
        async with client_of(short_path, lost_at=6, gate=gate) as (client, process):
            request = asyncio.create_task(end_of(client, ask("r", max_tokens=50)))
            await until(lambda: client.received("r").tokens > 0)
            client._transport.pause_reading()
            gate.set()
            await until(lambda: not process.alive)
            await process.exited()
            for _ in range(50):  # the client notices the end in one of these turns
                await asyncio.sleep(0)
            client._transport.resume_reading()
            assert SAID in (await request)[1]
            assert SAID in client.health().reason

    asyncio.run(live())


def test_requests_that_a_pause_holds_are_told_too(short_path):
    """What runs goes on in this pause, until the device is lost."""

    async def live():
        gate = Turnstile(1)
        async with client_of(short_path, lost_at=20, gate=gate) as (client, _):
            runs = asyncio.create_task(end_of(client, ask("runs", max_tokens=100)))
            await until(lambda: client.stats().num_running == 1)
            pause = asyncio.create_task(client.pause(PauseMode.WAIT))
            held = asyncio.create_task(end_of(client, ask("held")))
            await asyncio.sleep(0)
            gate.set()
            assert SAID in (await runs)[1]
            assert SAID in (await held)[1]
            with pytest.raises(EngineDeadError, match="toy device"):
                await pause

    asyncio.run(live())


@pytest.mark.parametrize("depth", [0, 1])
def test_an_engine_in_the_callers_process_raises_and_refuses_from_then_on(depth):
    shared = SharedLoop(make_loop(ToyDevice(32, 4, lost_at=5), depth=depth))
    first = shared.run([ask("a", max_tokens=30)])
    second = shared.run([ask("b", max_tokens=30)])
    next(first)
    for stream in (second, first):
        with pytest.raises(DeviceLostError, match="it was told to break"):
            list(stream)
    assert not shared.loop.busy
    for call in (
        lambda: list(shared.run([ask("c")])),
        lambda: shared.loop.step(),
        lambda: shared.sleep(0, PauseMode.KEEP),
        lambda: shared.wake_up([]),
        lambda: shared.loop.check_weights(),
    ):
        with pytest.raises(DeviceLostError):
            call()
    shared.close()


def test_tokens_that_were_taken_in_before_the_loss_are_told_first():
    loop = make_loop(ToyDevice(32, 4, lost_at=2), depth=1)
    loop.add(ask("a", max_tokens=9))
    news = []
    with pytest.raises(DeviceLostError):
        news.extend(delta for step in iter(loop.step, None) for delta in step)
    assert sum(len(delta.tokens) for delta in news) == 1


def test_the_device_is_asked_after_a_failed_step_and_only_its_loss_stops_the_engine():
    asked = []

    def well(error):
        asked.append(str(error))

    loop = make_loop(ToyDevice(32, 4, fail_at=[1]), diagnose=well)
    loop.add(ask("a", max_tokens=4))
    news = []
    while loop.busy:
        news += loop.step()
    assert len(asked) == 1
    assert "told to fail" in asked[0]
    assert news[-1].finish is FinishReason.ERROR

    loop = make_loop(ToyDevice(32, 4, fail_at=[1]), diagnose=lambda error: DeviceLostError("gpu", str(error)))
    loop.add(ask("a", max_tokens=4))
    loop.step()
    with pytest.raises(DeviceLostError, match="gpu: the toy device was told to fail"):
        loop.step()
