"""Several API processes of one server, in one process: they share the engine, one folder, and nothing else."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from batch_kit import begin, ended, form, get, jsonl, line, upload
from fastapi import FastAPI
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from server_kit import VOCAB_SIZE, Visitor, ask, eventually, make_frontend, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.server.board import Board, Count
from octavo.server.metrics import merge
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.siblings.crew import Crew
from octavo.server.siblings.link import ask as siblings_ask
from octavo.server.siblings.link import listening
from octavo.server.siblings.siblings import SiblingProcesses

WORK = {"prompt": "x" * 20, "max_tokens": 4}
Pace = Callable[[], Awaitable[None]]


@asynccontextmanager
async def family(
    folder: Path, count: int = 2, *, pace: Pace | None = None, max_num_seqs: int = 8, **config: Any
) -> AsyncIterator[list[FastAPI]]:
    """The apps of the processes; the first leads."""
    info = fake_info(name="toy", vocab_size=VOCAB_SIZE, max_num_seqs=max_num_seqs)
    engine = FakeEngine(saying("Bonjour"), info=info, pace=pace)
    settings = ServerConfig(jobs_dir=str(folder / "jobs"), **config)
    apps = []
    async with AsyncExitStack() as stack:
        for index in range(count):
            siblings = SiblingProcesses(index, count, folder)
            app = create_app(make_frontend(engine), settings, lifecycle=Lifecycle(siblings.board), siblings=siblings)
            await stack.enter_async_context(listening(app.state.private, siblings.path(index)))
            stack.push_async_callback(app.state.batches.stop)
            apps.append(app)
        yield apps


def played(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(within())


def test_a_response_is_known_wherever_a_client_lands(short_path: Path) -> None:
    async def scenario() -> None:
        async with family(short_path, 3) as apps:
            made = (await ask(apps[1], "/v1/responses", {"input": "Hello"})).json()
            reference = {"type": "item_reference", "id": made["output"][0]["id"]}
            for app in apps:
                assert (await ask(app, "/v1/responses", {"input": [reference]})).status == 200
                found = await ask(app, f"/v1/responses/{made['id']}", method="GET")
                assert (found.status, found.json()) == (200, made)
                path = f"/v1/responses/{made['id']}/input_items"
                items = (await ask(app, path, method="GET")).json()["data"]
                assert items[0]["content"] == [{"type": "input_text", "text": "Hello"}]
                assert (await ask(app, f"{path}?after={items[0]['id']}", method="GET")).json()["data"] == []
                later = await ask(app, "/v1/responses", {"input": "More", "previous_response_id": made["id"]})
                assert later.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"] + len("More")
            assert (await ask(apps[2], f"/v1/responses/{made['id']}", method="DELETE")).json()["deleted"]
            for app in apps:
                assert (await ask(app, f"/v1/responses/{made['id']}", method="GET")).error()["code"] == 404
            lost = await ask(apps[0], "/v1/responses", {"input": "More", "previous_response_id": made["id"]})
            assert lost.error()["param"] == "previous_response_id"

    played(scenario)


def test_a_response_in_the_background_is_cancelled_from_another_process(short_path: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with family(short_path, pace=gate.wait) as (first, second):
            made = (await ask(first, "/v1/responses", {"input": "Hello", "background": True})).json()
            cancelled = await ask(second, f"/v1/responses/{made['id']}/cancel")
            assert cancelled.json()["status"] == "cancelled"
            assert (await ask(first, f"/v1/responses/{made['id']}", method="GET")).json()["status"] == "cancelled"

    played(scenario)


def test_a_stream_in_the_background_is_followed_from_another_process(short_path: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with family(short_path, 3, pace=gate.wait) as apps:
            made = Visitor(apps[1], "/v1/responses", {"input": "Hello", "background": True, "stream": True})
            await made.heard.wait()
            name = json.loads(made.answer.pieces[0].split(b"\n")[1].removeprefix(b"data: "))["response"]["id"]
            later = Visitor(apps[2], f"/v1/responses/{name}?stream=true&starting_after=0", method="GET")
            await later.heard.wait()
            gone = Visitor(apps[0], f"/v1/responses/{name}?stream=true", method="GET")
            await gone.heard.wait()
            gone.leaves.set()
            await gone.whole()
            gate.set()
            whole = (await made.whole()).body
            assert (await later.whole()).body == whole.split(b"\n\n", 1)[1]

    played(scenario)


def test_files_and_batches_are_with_the_first_process(short_path: Path) -> None:
    content = jsonl([line("a"), line("b")])

    async def scenario() -> None:
        async with family(short_path) as (first, second):
            answer = await upload(second, content)
            assert answer.status == 200, answer.body
            facts = answer.json()
            assert answer.headers["x-request-id"]
            for app in (first, second):
                assert (await ask(app, f"/v1/files/{facts['id']}/content", method="GET")).body == content
            batch = await begin(second, [line("a"), line("b")])
            assert (await ended(first, batch))["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
            assert (await get(second, f"/v1/batches/{batch}")).json()["status"] == "completed"
            assert (await get(second, "/v1/files/nothing")).error()["code"] == 404

    played(scenario)


def test_a_large_upload_goes_through_and_one_too_large_is_told_so(short_path: Path) -> None:
    content = jsonl([line("a")] * 20_000)

    async def scenario() -> None:
        async with family(short_path, max_file_bytes=len(content)) as (_, second):
            body, headers = form(content, purpose="batch")
            parts = [body[start : start + 65536] for start in range(0, len(body), 65536)]
            headers = headers | {"content-length": str(len(body))}
            answer = await Visitor(second, "/v1/files", headers=headers, parts=parts).whole()
            assert answer.json()["bytes"] == len(content)
            body, headers = form(content + b"x", purpose="batch")
            parts = [body[start : start + 65536] for start in range(0, len(body), 65536)]
            refused = await Visitor(second, "/v1/files", headers=headers, parts=parts).whole()
            assert refused.error()["code"] == 413

    played(scenario)


def test_a_leader_that_is_gone_is_told(short_path: Path) -> None:
    async def scenario() -> None:
        async with family(short_path) as (_, second):
            (short_path / "api-0.sock").unlink()
            for path in ("/v1/files", "/v1/batches"):
                answer = await ask(second, path, method="GET")
                assert answer.error()["code"] == 503
                assert answer.headers["retry-after"]

    played(scenario)


def test_a_client_that_leaves_ends_what_was_relayed(short_path: Path) -> None:
    left = asyncio.Event()

    async def scenario() -> None:
        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()

        siblings = SiblingProcesses(1, 2, short_path)
        async with listening(slow, siblings.path(0)), family(short_path / "x") as (_, second):
            second.router.add_route("/slow", siblings.relayed, methods=["GET"])
            visitor = Visitor(second, "/slow", method="GET")
            await visitor.heard.wait()
            assert visitor.answer.pieces == [b"first"]
            visitor.leaves.set()
            await visitor.task
            await left.wait()

    (short_path / "x").mkdir()
    played(scenario)


def test_a_refusal_is_relayed_before_the_upload_ends(short_path: Path) -> None:
    async def scenario() -> None:
        async def refusing(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"too large"})

        siblings = SiblingProcesses(1, 2, short_path)
        async with listening(refusing, siblings.path(0)), family(short_path / "x") as (_, second):
            second.router.add_route("/up", siblings.relayed, methods=["POST"])
            endless = Uploading(second, "/up")
            answer = await endless.whole()
            assert (answer.status, answer.body) == (413, b"too large")

    (short_path / "x").mkdir()
    played(scenario)


class Uploading(Visitor):
    """A client whose body never ends."""

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1024, "more_body": True}


def test_unexpected_errors_have_the_usual_form(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with family(short_path) as (first, second):
            first.state.batches.files = None  # any use of it fails
            answer = await ask(second, "/v1/files", method="GET", headers={"x-request-id": "abc"})
            assert answer.error()["code"] == 500
            assert "abc" in answer.error()["message"]
            assert [message for message in caplog.messages if "abc" in message] == [
                "Request abc failed with an unexpected error."
            ]

    played(scenario)


def test_a_response_that_fails_midway_is_cut_off(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def failing(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            raise RuntimeError

        siblings = SiblingProcesses(1, 2, short_path)
        async with listening(failing, siblings.path(0)), family(short_path / "x") as (_, second):
            second.router.add_route("/down", siblings.relayed, methods=["GET"])
            visitor = Visitor(second, "/down", method="GET")
            with pytest.raises(RuntimeError):
                await visitor.whole()
            assert visitor.answer.pieces == [b"first"]
            assert not visitor.answer.ended

    (short_path / "x").mkdir()
    played(scenario)


def test_requests_in_flight_end_quietly_with_the_link(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def stuck(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        path = short_path / "api-0.sock"
        async with listening(stuck, path):
            asking = asyncio.create_task(siblings_ask(path, "GET", "/"))
            await begun.wait()
        with pytest.raises(ConnectionError):
            await asking

    played(scenario)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_queued_reqs": 1}, "1 requests are waiting"),
        ({"max_num_queued_tokens": 50}, "tokens are waiting"),
        ({"max_tenant_requests": 2}, "without a tenant have 2 requests here, as many as --max-tenant-requests allows"),
    ],
)
def test_limits_of_the_queue_hold_for_all_processes_together(
    short_path: Path, limits: dict[str, int], message: str
) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with family(short_path, pace=gate.wait, max_num_seqs=1, **limits) as (first, second):
            running = [Visitor(app, "/v1/completions", WORK) for app in (first, second)]
            for index in range(2):
                board = Board(index, 2, short_path / "board")
                await eventually(lambda board=board: board.own(Count.CHOICES) == 1)  # type: ignore[misc]
            for app in (first, second):
                refused = await ask(app, "/v1/completions", WORK)
                assert refused.error()["code"] == 429
                assert message in refused.error()["message"]
                assert (await ask(app, "/load", method="GET")).json() == {"server_load": 2}
            gate.set()
            for visitor in running:
                assert (await visitor.whole()).status == 200
            assert (await ask(first, "/v1/completions", WORK)).status == 200
            assert (await ask(second, "/load", method="GET")).json() == {"server_load": 0}

    played(scenario)


def test_requests_at_once_are_limited_over_all_processes(short_path: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        async with family(short_path, pace=gate.wait, max_concurrent_requests=1) as (first, second):
            running = Visitor(first, "/v1/completions", WORK)
            await eventually(lambda: Board(0, 2, short_path / "board").own(Count.SERVED) == 1)
            assert (await ask(second, "/v1/completions", WORK)).error()["code"] == 503
            gate.set()
            assert (await running.whole()).status == 200
            assert (await ask(second, "/v1/completions", WORK)).status == 200

    played(scenario)


def test_what_a_dead_process_held_is_given_back(short_path: Path) -> None:
    boards = [Board(index, 2, short_path / "board") for index in range(2)]
    for board in boards:
        board.add_tenant("a", 1)
    boards[1].add_tenant("b", 1)
    boards[0].add(Count.CHOICES, 3)
    boards[1].add(Count.CHOICES, 4)
    assert boards[0].total(Count.CHOICES) == boards[1].total(Count.CHOICES) == 7
    assert [boards[0].of_tenant(name) for name in "abc"] == [2, 1, 0]
    boards[0].clear(1)
    assert [boards[0].of_tenant(name) for name in "abc"] == [1, 0, 0]
    assert [board.total(Count.CHOICES) for board in boards] == [3, 3]


def test_places_of_tenants_are_used_again_and_the_last_one_is_of_all_further_names(short_path: Path) -> None:
    boards = [Board(index, 2, short_path / "board") for index in range(2)]
    for _ in range(3):
        for number in range(1030):
            boards[0].add_tenant(f"t{number}", 1)
        boards[0].add_tenant("t5", 1)
        assert [boards[1].of_tenant(f"t{number}") for number in (0, 5, 1022)] == [1, 2, 1]
        assert boards[0].of_tenant("t1029") == boards[0].of_tenant("other") == 7
        for number in (*range(1023, 1030), *range(1023), 5):
            boards[0].add_tenant(f"t{number}", -1)
        assert boards[0].of_tenant("t5") == boards[0].of_tenant("t1029") == 0


def test_a_board_without_room_on_the_disk_is_refused(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first request that is counted would end its process."""
    Board(0, 2, short_path / "board")
    assert (short_path / "board").stat().st_blocks, "it has all of its pages"

    def full(*args: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"board can't be allocated \(No space left on device\)"):
        Board(0, 2, short_path / "board")


def families(count: int, start: float) -> list[Any]:
    counter = CounterMetricFamily("requests", "Requests.", labels=["handler"])
    counter.add_metric(["/a"], count)
    memory = GaugeMetricFamily("process_resident_memory_bytes", "Memory.", value=10 * count)
    return [counter, memory, GaugeMetricFamily("process_start_time_seconds", "Start.", value=start)]


def samples(told: list[Any]) -> dict[str, float]:
    return {sample.name: sample.value for family in told for sample in family.samples}


def test_what_a_process_counted_between_two_scrapes_stays_if_it_dies(short_path: Path) -> None:
    async def scenario() -> None:
        async with family(short_path) as apps:
            crew = Crew(SiblingProcesses(0, 2, short_path), [], {}, 0)
            await ask(apps[1], "/v1/completions", WORK)
            assert await crew._answers(1, 60)  # the look at whether it lives
            crew._lose(1)
            kept = {family.name: family for family in merge.total(await crew.metrics())}
            assert [sample.value for sample in kept["http_requests"].samples] == [1]

    played(scenario)


def test_metrics_add_up_and_those_of_the_dead_stay() -> None:
    carried = merge.decode(merge.encode(families(2, 7.0)))
    assert samples(merge.total([families(3, 9.0), carried])) == {
        "requests_total": 5.0,
        "process_resident_memory_bytes": 50.0,
        "process_start_time_seconds": 7.0,
    }
    assert samples(merge.total([families(3, 9.0), merge.lasting(carried)])) == {
        "requests_total": 5.0,
        "process_resident_memory_bytes": 30.0,
        "process_start_time_seconds": 9.0,
    }
