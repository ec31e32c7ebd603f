"""What a client knows of its core's health: progress, signs of life, stalls, death, and its own standstill."""

from __future__ import annotations

import asyncio
import os
import threading
from types import SimpleNamespace

import pytest
from core_kit import ask, client_of, run, tokens_of, until

from octavo.core.errors import EngineDeadError
from octavo.core.output import FinishReason
from octavo.core.params import RepetitionDetection
from octavo.core.pausing import SleepTag
from octavo.engine import client as client_module
from octavo.engine.client import CoreClient
from octavo.engine.process import CoreElsewhere
from octavo.engine.toy import toy_generate
from octavo.schedule import outputs


def test_health_tells_a_stall_from_idleness_and_from_death(short_path, monkeypatch):
    monkeypatch.setattr("octavo.engine.client._DRAIN_S", 0.01)  # the thread keeps its socket

    async def main():
        gate = threading.Event()
        async with client_of(short_path, gate=gate, stall_after_s=0.02) as (client, process):
            await asyncio.sleep(0.03)
            assert client.health().ok, "idle is healthy, however long"
            reading = asyncio.create_task(tokens_of(client, ask("r")))
            await until(lambda: not client.health().ok)
            assert "no step has completed" in client.health().reason
            gate.set()
            await reading
            assert client.health().ok
            gate.clear()
            reading = asyncio.create_task(tokens_of(client, ask("r2")))
            await until(lambda: process.loop.busy)
            process.killed.set()
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await reading
            assert client.health().reason == "The engine core was killed by SIGKILL."
            assert client.health().final
            with pytest.raises(EngineDeadError):
                await tokens_of(client, ask("r3"))

    run(main())


def test_a_row_that_can_not_be_taken_in_ends_one_stream_and_the_core_stays_well(short_path, monkeypatch):
    def repeats(tokens, rule, start):
        raise KeyError("a pattern")

    monkeypatch.setattr(outputs, "repeats", repeats)
    rule = RepetitionDetection(max_pattern_size=3, min_count=2)

    async def main():
        async with client_of(short_path) as (client, process):
            other = asyncio.create_task(tokens_of(client, ask("other", ignore_eos=True)))
            news = [delta async for delta in client.generate(ask("guilty", repetition_detection=rule, max_tokens=1))]
            assert news[-1].finish is FinishReason.ERROR
            assert news[-1].error == "Internal error: KeyError: 'a pattern'"
            assert await other == toy_generate([1, 2, 3], 8, stop_ids=())
            await until(lambda: not process.loop.busy)
            assert client.health().ok
            assert await tokens_of(client, ask("next", ignore_eos=True)) == toy_generate([1, 2, 3], 8, stop_ids=())
            assert client.health().ok

    run(main())


def test_a_stall_is_logged_once_with_the_stacks_and_so_is_its_end(short_path, caplog):
    async def main():
        gate = threading.Event()
        async with client_of(short_path, gate=gate, stall_after_s=0.3) as (client, process):
            reading = asyncio.create_task(tokens_of(client, ask("r")))
            await until(lambda: process.stacks_shown)
            assert "1 requests wait, but no step has completed" in caplog.text
            gate.set()
            await reading
            await until(lambda: "makes progress again" in caplog.text)
            assert process.stacks_shown == 1
            assert caplog.text.count("makes no progress") == 1

    run(main())


def test_an_idle_core_gives_signs_of_life_and_one_that_gives_none_is_ill(short_path):
    async def main():
        async with client_of(short_path, stall_after_s=0.02) as (client, _):
            client._heard_at -= 100
            assert "has sent no heartbeat for 100 s" in client.health().reason
            assert not client.health().final
            await until(lambda: client.health().ok)

    run(main())


def test_a_core_that_executes_a_long_command_is_well(short_path, monkeypatch):
    """Also if nothing waits for the command's end any more."""

    async def main():
        gate = threading.Event()
        async with client_of(short_path, stall_after_s=0.02) as (client, process):
            monkeypatch.setattr(process.loop, "wake_up", lambda parts: [gate.wait()][1:])
            waking = asyncio.create_task(client.wake_up([SleepTag.WEIGHTS]))
            await until(lambda: client.commanded)
            client._heard_at -= 100
            assert client.health().ok
            waking.cancel()
            await asyncio.wait({waking})
            client._heard_at -= 100
            assert client.health().ok
            gate.set()
            await until(lambda: not client.commanded)

    run(main())


def test_a_core_that_executes_a_long_command_of_another_client_is_well(short_path, monkeypatch):
    """Also for one that connects meanwhile, and if the client that sent the command is gone."""

    async def other(process):
        return await CoreClient.start(CoreElsewhere(process.address, os.getpid()), stall_after_s=0.02)

    async def main():
        gate = threading.Event()
        async with client_of(short_path, stall_after_s=0.02) as (owner, process):
            sender, watcher = await other(process), await other(process)
            staging = threading.Event()
            monkeypatch.setattr(process.loop, "check_weights", lambda: process.loop.worker)
            monkeypatch.setattr(process.loop.worker, "begin_weights", staging.wait, raising=False)
            monkeypatch.setattr(process.loop, "wake_up", lambda parts: [gate.wait()][1:])
            beginning = asyncio.create_task(sender.begin_weights())
            await until(lambda: watcher.commanded)
            late = await other(process)
            await until(lambda: late.commanded)
            waking = asyncio.create_task(sender.wake_up([SleepTag.WEIGHTS]))
            await asyncio.sleep(0)
            await sender.close()
            await asyncio.wait({beginning, waking})
            for client in (owner, watcher, late):
                client._heard_at -= 100
                assert client.health().ok
            gate.set()
            staging.set()
            await until(lambda: not (watcher.commanded or late.commanded or owner.commanded))
            watcher._heard_at -= 100
            assert not watcher.health().ok
            await asyncio.gather(watcher.close(), late.close())

    run(main())


def test_a_core_that_does_not_answer_the_call_of_a_feature_is_ill(short_path, monkeypatch):
    async def main():
        gate = threading.Event()
        async with client_of(short_path, stall_after_s=0.02) as (client, process):
            monkeypatch.setattr(process.loop, "call", lambda *call: gate.wait())
            calling = asyncio.create_task(client.call("some", "list", {}))
            await until(lambda: client._calls)
            client._heard_at -= 100
            assert not client.health().ok
            gate.set()
            await calling

    run(main())


def test_a_client_that_stood_still_itself_does_not_blame_the_core(short_path, monkeypatch, caplog):
    clock = [1000.0]
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client_module, "_LOOK_S", 0.001)

    async def main():
        gate = threading.Event()
        async with client_of(short_path, gate=gate, stall_after_s=60) as (client, process):

            async def looked():
                await until(lambda: client._looked_at == clock[0])
                return client.health().ok

            reading = asyncio.create_task(tokens_of(client, ask("r")))
            await until(lambda: process.loop.busy)
            clock[0] += 3600
            assert client.health().ok
            assert await looked()
            thawed = clock[0]
            while await looked():
                clock[0] += 0.5
            assert 60 <= clock[0] - thawed <= 61
            await until(lambda: "makes no progress" in caplog.text)
            gate.set()
            await reading

    run(main())


def test_a_core_whose_socket_was_removed_is_not_waited_for(short_path):
    async def main():
        async with client_of(short_path) as (_, process):
            os.unlink(process.address)
            with pytest.raises(EngineDeadError, match=r"core\.sock can't be reached .*restart the server"):
                await CoreClient.start(CoreElsewhere(process.address, os.getpid()))

    run(main())
