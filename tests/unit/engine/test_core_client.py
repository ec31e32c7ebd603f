"""A core and its client over real sockets, with the toy device for a model and a thread for a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from unittest.mock import Mock

import msgspec
import pytest
import uvloop
from core_kit import Turnstile, ask, client_of, run, tokens_of, until

from octavo.core.errors import (
    ConfigError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    SlowReaderError,
)
from octavo.core.info import Received
from octavo.core.output import FinishReason, TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.stats import FeatureMetric
from octavo.engine import core_server, wire
from octavo.engine.client import CoreClient
from octavo.engine.frames import frame
from octavo.engine.inbox import Inbox
from octavo.engine.loop import EngineLoop
from octavo.engine.process import CoreElsewhere
from octavo.engine.toy import toy_generate
from octavo.schedule.hooks import EngineHook
from octavo.schedule.queue import RankedQueue


def test_many_requests_each_get_their_own_tokens(short_path):
    async def main():
        phases = []
        async with client_of(short_path, on_phase=lambda name, s: phases.append((name, s is None))) as (client, _):
            prompts = [[i, 2, 3] for i in range(1, 20)]
            got = await asyncio.gather(*(tokens_of(client, ask(f"r{p[0]}", p, ignore_eos=True)) for p in prompts))
            assert got == [toy_generate(p, 8, stop_ids=()) for p in prompts]
            await until(lambda: client.stats().num_running == 0)
            assert client.stats().generation_tokens == 19 * 8
        assert phases == [("weights", True), ("weights", False)]

    run(main())


def test_what_has_come_for_a_request_is_known_whoever_reads_it(short_path):
    async def main():
        async with client_of(short_path) as (client, _):
            stream = client.generate(ask("r", n=2, ignore_eos=True))
            first = await anext(stream)
            await until(lambda: client.received("r").tokens == 16)
            assert len(first.tokens) < 16, "the rest waits to be read"
            assert client.received("r").at == client._heard_at
            await stream.aclose()
            assert client.received("r") == client.received("unknown") == Received()

    run(main())


def test_closing_the_stream_frees_the_request_within_a_step(short_path):
    async def main():
        gate = threading.Event()
        gate.set()
        async with client_of(short_path, gate=gate) as (client, process):
            stream = client.generate(ask("r", max_tokens=150, ignore_eos=True))
            await anext(stream)
            gate.clear()
            await stream.aclose()
            steps = process.loop.stats().num_steps
            gate.set()
            await until(lambda: not process.loop.busy)
            assert process.loop.stats().num_steps <= steps + 2
            process.loop.check_idle()
            assert await tokens_of(client, ask("next"))

    run(main())


def test_one_choice_can_be_ended_alone(short_path):
    async def main():
        gate = threading.Event()
        gate.set()
        async with client_of(short_path, gate=gate) as (client, _):
            ends, lengths = {}, {0: 0, 1: 0}
            async for delta in client.generate(ask("r", n=2, max_tokens=30, ignore_eos=True)):
                if delta.index == 1 and not lengths[1]:
                    await client.abort("r", 1)
                lengths[delta.index] += len(delta.tokens)
                if delta.finish:
                    ends[delta.index] = delta.finish
            assert ends[0] is FinishReason.LENGTH
            assert lengths[0] == 30
            assert ends[1] in (FinishReason.ABORT, FinishReason.LENGTH)

    run(main())


def test_the_books_are_checked_once_the_engine_has_been_idle_for_a_while(short_path, monkeypatch):
    """It takes longer than a client needs to send the next request."""
    seen = []
    check = EngineLoop.check_idle
    monkeypatch.setattr(core_server, "_IDLE_POLL_MS", 1)
    monkeypatch.setattr(core_server, "_QUIET_S", 60.0)
    monkeypatch.setattr(
        EngineLoop, "check_idle", lambda loop, *, books: (seen.append(books), check(loop, books=books))[1]
    )

    async def main():
        async with client_of(short_path) as (client, _):
            for name in "abc":
                await tokens_of(client, ask(name))
            await until(lambda: len(seen) == 3)
            assert not any(seen)
            monkeypatch.setattr(core_server, "_QUIET_S", 0.0)
            await until(lambda: any(seen))
            await tokens_of(client, ask("d"))
            await until(lambda: len(seen) == 6)
            assert seen == [False, False, False, True, False, True]

    run(main())


class Broken(EngineHook):
    """A feature with a bug: it fails on each new request for it."""

    name = "broken"

    def namespace(self, spec):
        raise KeyError("an adapter")


def test_a_request_that_can_not_be_queued_ends_alone(short_path):
    async def main():
        async with client_of(short_path, hooks=[Broken()]) as (client, process):
            other = asyncio.create_task(tokens_of(client, ask("other", ignore_eos=True)))
            guilty = msgspec.structs.replace(ask("guilty", n=2), options={"broken": msgspec.Raw(b"\x90")})
            news = [delta async for delta in client.generate(guilty)]
            assert [(delta.index, delta.finish) for delta in news] == [(i, FinishReason.ERROR) for i in (0, 1)]
            assert news[0].error == "Internal error: KeyError: 'an adapter'"
            assert await other == toy_generate([1, 2, 3], 8, stop_ids=())
            assert await tokens_of(client, ask("guilty"))
            await until(lambda: not process.loop.busy)
            process.loop.check_idle()
            assert process.code is None

    run(main())


def test_of_a_request_that_is_queued_in_part_nothing_stays(short_path, monkeypatch):
    push, pushed = RankedQueue.push, []

    def fails_once(queue, request):
        pushed.append(request)
        if len(pushed) == 2:
            raise KeyError("a rank")
        push(queue, request)

    monkeypatch.setattr(RankedQueue, "push", fails_once)

    async def main():
        async with client_of(short_path) as (client, process):
            news = [delta async for delta in client.generate(ask("guilty", n=2))]
            assert news[0].error == "Internal error: KeyError: 'a rank'"
            assert await tokens_of(client, ask("guilty"))
            await until(lambda: not process.loop.busy)
            process.loop.check_idle()
            assert process.loop.stats().num_waiting == 0

    run(main())


def test_blocks_that_a_bug_has_lost_are_found_again_and_end_no_core(short_path, caplog):
    async def main():
        async with client_of(short_path) as (client, process):
            assert await tokens_of(client, ask("first"))
            cache = process.loop._scheduler.cache
            cache.lease_new(3, "a bug")
            cache.leases.clear()
            assert await tokens_of(client, ask("next", ignore_eos=True)) == toy_generate([1, 2, 3], 8, stop_ids=())
            await until(lambda: "a bug in Octavo left something" in caplog.text)
            assert await tokens_of(client, ask("last", ignore_eos=True)) == toy_generate([1, 2, 3], 8, stop_ids=())
            await until(lambda: not process.loop.busy)
            process.loop.check_idle()
            assert cache.num_free == cache.num_blocks
            assert process.code is None

    run(main())


def test_a_refusal_reaches_only_its_request(short_path):
    async def main():
        async with client_of(short_path) as (client, _):
            with pytest.raises(InvalidRequestError, match="maximum context length is 200") as caught:
                await tokens_of(client, ask("long", range(1, 199), max_tokens=9))
            assert caught.value.param == "max_tokens"
            assert await tokens_of(client, ask("short"))

    run(main())


def test_what_keeps_the_core_from_starting_is_raised_as_it_was(short_path):
    async def main():
        with pytest.raises(ConfigError, match="too little to serve"):
            async with client_of(short_path, fail=ConfigError("too little to serve anything")):
                pass

    run(main())


def test_a_bug_at_start_is_reported_with_its_name(short_path, caplog):
    async def main():
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: oops"):
            async with client_of(short_path, fail=ZeroDivisionError("oops")):
                pass

    run(main())


def test_a_reader_that_lags_too_far_behind_loses_its_request(short_path):
    async def main():
        async with client_of(short_path, max_unread_tokens=10) as (client, _):
            sent = []
            client._send = sent.append
            inbox = client._streams["slow"] = Inbox()
            for token in range(20):
                client._take(wire.StepDeltas([TokenDelta("slow", 0, [token])], client.stats()))
                await asyncio.sleep(0)
            assert sent == [wire.Abort("slow")]
            assert client.slow_readers == 1
            assert [(await inbox.get()).tokens[0] for _ in range(11)] == list(range(11))
            with pytest.raises(SlowReaderError, match="10 tokens"):
                await inbox.get()
            del client._streams["slow"], client._send

    run(main())


def test_a_reader_that_waits_is_not_slow_however_much_comes_before_its_turn(short_path):
    async def main():
        async with client_of(short_path, max_unread_tokens=10) as (client, _):
            inbox = client._streams["quick"] = Inbox()

            async def read():
                return [(await inbox.get()).tokens[0] for _ in range(30)]

            reading = asyncio.create_task(read())
            await asyncio.sleep(0)
            for token in range(30):
                client._take(wire.StepDeltas([TokenDelta("quick", 0, [token])], client.stats()))
            assert await reading == list(range(30))
            assert client.slow_readers == 0
            del client._streams["quick"]

    run(main())


def test_news_in_one_piece_is_never_too_much(short_path):
    """A search tells all at its end; a client that reads has no way to read it sooner."""

    async def main():
        async with client_of(short_path, max_unread_tokens=10) as (client, _):
            client._streams["whole"] = inbox = Inbox()
            client._take(wire.StepDeltas([TokenDelta("whole", 0, list(range(50)))], client.stats()))
            assert (await inbox.get()).tokens == list(range(50))
            assert client.slow_readers == 0
            del client._streams["whole"]

    run(main())


@contextlib.asynccontextmanager
async def guest_of(process, **options):
    """One more client of a core that is another's."""
    client = await CoreClient.start(CoreElsewhere(process.address, os.getpid()), **options)
    try:
        yield client
    finally:
        await client.close()


def test_clients_that_share_a_core_get_their_own_tokens_and_leave_it_running(short_path):
    async def main():
        async with client_of(short_path) as (owner, process):
            async with guest_of(process) as one, guest_of(process) as two:
                assert one.info == two.info == owner.info
                clients = (owner, one, two)
                prompts = [[i, 2, 3] for i in range(1, 4)]
                got = await asyncio.gather(
                    *(tokens_of(c, ask(f"r{p[0]}", p, ignore_eos=True)) for c, p in zip(clients, prompts, strict=True))
                )
                assert got == [toy_generate(p, 8, stop_ids=()) for p in prompts]
                for client in clients:
                    await until(lambda client=client: client.stats().generation_tokens == 24)
            assert await tokens_of(owner, ask("after"))

    run(main())


def test_a_reset_is_done_and_counted_when_it_returns(short_path):
    async def main():
        async with client_of(short_path) as (client, process):
            await tokens_of(client, ask("r", list(range(1, 20))))
            await until(lambda: client.stats().num_blocks_cached > 0)
            await client.reset_prefix_cache()
            assert process.loop.stats().num_blocks_cached == client.stats().num_blocks_cached == 0

    run(main())


def test_a_pause_is_over_all_clients_and_ends_when_it_has_settled(short_path):
    async def main():
        async with client_of(short_path, stall_after_s=0.02) as (owner, process), guest_of(process) as guest:
            stream = guest.generate(ask("r", max_tokens=150, ignore_eos=True))
            await anext(stream)
            await owner.pause(PauseMode.KEEP)
            await until(lambda: guest.stats().paused)
            waiting = asyncio.create_task(tokens_of(owner, ask("late")))
            await until(lambda: process.loop.stats().num_waiting)
            await asyncio.sleep(0.03)
            assert owner.health().ok, "who pauses does not stall"
            pausing = asyncio.create_task(owner.pause(PauseMode.WAIT))
            rest = [token async for delta in stream for token in delta.tokens]
            await pausing
            assert len(rest) == 149
            assert not waiting.done()
            with pytest.raises(EngineStateError, match="enable-sleep-mode"):
                await owner.sleep(1, PauseMode.ABORT)
            await guest.resume()
            await until(lambda: not owner.stats().paused)
            assert await waiting
            await owner.sleep(0, PauseMode.ABORT)
            assert owner.stats().sleep_level == 0
            with pytest.raises(EngineStateError, match="sleeps"):
                await owner.resume()
            await owner.wake_up([SleepTag.SCHEDULING])
            assert await tokens_of(owner, ask("next"))

    run(main())


def test_a_pause_that_somebody_ends_before_it_has_settled_says_so(short_path):
    async def main():
        gate = Turnstile(1)
        async with client_of(short_path, gate=gate) as (owner, _):
            stream = owner.generate(ask("r", max_tokens=150, ignore_eos=True))
            await anext(stream)
            pausing = asyncio.create_task(owner.pause(PauseMode.WAIT))
            await asyncio.sleep(0)
            resuming = asyncio.create_task(owner.resume())
            await asyncio.sleep(0)
            gate.set()
            with pytest.raises(EngineStateError, match="was ended before"):
                await pausing
            await resuming
            assert len([token async for delta in stream for token in delta.tokens]) == 149

    run(main())


def test_requests_of_all_clients_end_by_name(short_path):
    async def main():
        async with client_of(short_path) as (owner, process), guest_of(process) as guest:
            await owner.pause(PauseMode.ABORT)
            names = ["cmpl-a-0123456789ab", "cmpl-b-0123456789ab", "cmpl-c-0123456789ab"]
            tasks = [asyncio.create_task(tokens_of(guest, ask(name, max_tokens=99))) for name in names]
            await until(lambda: process.loop.stats().num_waiting == 3)
            assert await owner.abort_named(["a", "unknown"]) == 1
            assert await tasks[0] == []
            assert not tasks[1].done()
            assert await owner.abort_named(None) == 2
            assert [await task for task in tasks] == [[], [], []]

    run(main())


def test_an_abort_that_fails_ends_no_other_request(short_path, caplog):
    async def main():
        async with client_of(short_path) as (client, process):
            stream = client.generate(ask("r", max_tokens=150, ignore_eos=True))
            await anext(stream)
            process.loop.abort = Mock(side_effect=RuntimeError("a bug"))
            await client.abort("r")
            assert len([token async for delta in stream for token in delta.tokens]) >= 100
        assert "could not be aborted" in caplog.text

    run(main())


@pytest.mark.parametrize("leaves", [True, False])
def test_requests_of_a_client_that_is_gone_end(short_path, leaves):
    """It closes, or dies: its connection ends in the middle of a message."""

    async def main():
        gate = threading.Event()
        gate.set()
        async with client_of(short_path, gate=gate) as (owner, process), guest_of(process) as guest:
            stream = guest.generate(ask("r", max_tokens=150, ignore_eos=True))
            await anext(stream)
            gate.clear()
            if leaves:
                await guest.close()
            else:
                guest._transport.write(frame(wire.encode(wire.Add(ask("late"))))[:-1])
                guest._transport.close()
            gate.set()
            await until(lambda: not process.loop.busy)
            process.loop.check_idle()
            assert await tokens_of(owner, ask("next"))
            await until(lambda: owner.stats().num_running == 0)

    run(main())


def test_each_client_sees_a_stall_and_the_end_of_the_core(short_path):
    async def main():
        gate = threading.Event()
        async with (
            client_of(short_path, gate=gate, stall_after_s=0.02) as (owner, process),
            guest_of(process, stall_after_s=0.02) as guest,
        ):
            await asyncio.sleep(0.03)
            assert guest.health().ok, "idle is healthy, however long"
            reading = asyncio.create_task(tokens_of(owner, ask("r")))
            await until(lambda: not guest.health().ok)
            assert "1 requests wait, but no step has completed" in guest.health().reason
            gate.set()
            await reading
            await until(lambda: guest.health().ok)

    run(main())


def test_a_client_sees_that_a_core_elsewhere_has_died(short_path, monkeypatch):
    monkeypatch.setattr("octavo.engine.client._DRAIN_S", 0.01)  # the thread keeps its socket

    async def main():
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
            async with client_of(short_path) as (_, process):
                guest = await CoreClient.start(CoreElsewhere(process.address, stranger.pid))
                assert guest.health().ok
                stranger.kill()
                stranger.wait()
                await until(lambda: not guest.health().ok)
                assert "has ended" in guest.health().reason
                with pytest.raises(EngineDeadError):
                    await tokens_of(guest, ask("r"))
                await guest.close()

    run(main())


class Counter(EngineHook):
    """A feature that counts the calls it gets, in a thread if they are slow."""

    name = "counter"

    def __init__(self):
        self.count = 0
        self.gate = threading.Event()

    def call(self, method, args):
        if method == "fail":
            raise InvalidRequestError("by must be positive.", param="by", value=args["by"])
        if method not in ("add", "add slowly"):
            return super().call(method, args)
        self.count += args["by"]
        if method == "add":
            return {"count": self.count}
        result = Future()
        threading.Thread(target=lambda: self.gate.wait() and result.set_result(self.count)).start()
        return result


def test_calls_of_a_feature_reach_it_and_come_back(short_path):
    """From any client, in order; a slow one holds up neither steps nor other calls."""

    async def main():
        counter = Counter()
        async with client_of(short_path, hooks=[counter]) as (owner, process), guest_of(process) as guest:
            assert await owner.call("counter", "add", {"by": 2}) == {"count": 2}
            slow = asyncio.create_task(guest.call("counter", "add slowly", {"by": 5}))
            await until(lambda: counter.count == 7)
            assert len(await tokens_of(owner, ask("r"))) > 0
            assert await guest.call("counter", "add", {"by": 1}) == {"count": 8}
            assert not slow.done()
            counter.gate.set()
            assert await slow == 8
            with pytest.raises(InvalidRequestError, match="by must be positive") as refused:
                await owner.call("counter", "fail", {"by": -1})
            assert refused.value.param == "by"
            with pytest.raises(InvalidRequestError, match="'counter' has no method 'subtract'"):
                await owner.call("counter", "subtract", {})
            with pytest.raises(InvalidRequestError, match="does not have the feature 'missing'"):
                await owner.call("missing", "add", {})

    run(main())


class Searcher(EngineHook):
    """A feature whose call ends in a turn of the engine, after the gate was opened."""

    name = "searcher"

    def __init__(self):
        self.gate = threading.Event()
        self.result = None
        self.turns = self.later_turns = self.measured = 0

    def call(self, method, args):
        self.result = Future()
        return self.result

    def turn(self):
        if self.result is None:
            return
        self.turns += 1
        if self.result.done():
            self.later_turns += 1
        elif self.gate.is_set():
            self.result.set_result("found")

    def metrics(self):
        self.measured += 1
        found = float(self.result is not None and self.result.done())
        return (FeatureMetric("found", "gauge", "Whether it was found.", "", {"": found}),)


def test_a_call_that_waits_costs_an_idle_engine_little(short_path, monkeypatch):
    """Its turns are frequent, but gauges are not made in each; an answer comes with new ones, and then a turn."""
    monkeypatch.setattr("octavo.engine.core_server._STATS_S", 600.0)
    monkeypatch.setattr("octavo.engine.core_server._IDLE_POLL_MS", 600_000)

    async def main():
        searcher = Searcher()
        async with client_of(short_path, hooks=[searcher]) as (client, _):
            search = asyncio.create_task(client.call("searcher", "search", {}))
            await until(lambda: searcher.turns > 20)
            assert searcher.measured < 5
            searcher.gate.set()
            assert await search == "found"
            assert client.stats().features[0].values == {"": 1.0}
            await until(lambda: searcher.later_turns == 1)

    run(main())


def test_a_call_whose_client_has_gone_ends_without_effect_on_others(short_path):
    async def main():
        searcher, counter = Searcher(), Counter()
        async with client_of(short_path, hooks=[searcher, counter]) as (owner, process):
            async with guest_of(process) as guest:
                search = asyncio.create_task(guest.call("searcher", "search", {}))
                await until(lambda: searcher.result is not None)
            with pytest.raises(EngineDeadError):
                await search
            for count in (1, 2):  # the core has read the end of the connection when it reads the second call
                assert await owner.call("counter", "add", {"by": 1}) == {"count": count}
            searcher.gate.set()
            await until(lambda: searcher.later_turns or not process.alive)
            assert len(await tokens_of(owner, ask("r"))) > 0

    run(main())


def test_a_request_between_the_loss_of_the_connection_and_the_end_of_the_process_ends_as_others_do(short_path):
    """On the server's event loop, whose closed connections refuse to be written to."""

    async def main():
        async with client_of(short_path) as (client, process):
            client._transport.abort()
            await until(client._disconnected.is_set)
            waiting = asyncio.create_task(tokens_of(client, ask("r")))
            await asyncio.sleep(0)  # it is sent now
            process.killed.set()
            with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
                await waiting

    uvloop.run(main())
