from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_kit import CHAT, begin, ended, get, journal_of, jsonl, line, results, running, service_of, upload
from server_kit import HELLO, House, Visitor, ask, echoing, eventually, ids, make_house, saying

from octavo.config import ServerConfig
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.engine.fake import Script
from octavo.server.batch.journal import Journal


def house_at(folder: Path, script: Script, pace: Any = None, **settings: Any) -> House:
    return make_house(script, ServerConfig(jobs_dir=str(folder), **settings), pace=pace)


def test_every_line_is_answered_once_in_order(tmp_path: Path) -> None:
    async def run() -> None:
        house = house_at(tmp_path, saying("Fine."), batch_concurrency=3)
        async with running(house.app) as app:
            lines = [line(f"c{number}", f"say {number}") for number in range(20)]
            lines[7] = line("bad", temperature=-1)
            batch = await ended(app, await begin(app, lines, metadata={"who": "me"}))
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 20, "completed": 19, "failed": 1}
            assert batch["metadata"] == {"who": "me"}
            assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
            good = await results(app, batch["output_file_id"])
            assert [one["custom_id"] for one in good] == [
                one["custom_id"] for one in lines if one["custom_id"] != "bad"
            ]
            for one in good:
                assert one["error"] is None
                assert one["response"]["status_code"] == 200
                assert one["response"]["body"]["choices"][0]["message"]["content"] == "Fine"
            (bad,) = await results(app, batch["error_file_id"])
            assert bad["custom_id"] == "bad"
            assert bad["response"]["status_code"] == 400
            assert "temperature" in bad["response"]["body"]["error"]["message"]
            assert len({one["id"] for one in [*good, bad]}) == 20
            assert (await get(app, "/v1/batches")).json()["data"] == [batch]
            files = (await get(app, "/v1/files?purpose=batch_output")).json()["data"]
            assert {one["id"] for one in files} == {batch["output_file_id"], batch["error_file_id"]}
            metrics = (await get(app, "/metrics")).body.decode()
            assert 'octavo:batch_requests_total{engine="0",model_name="toy",outcome="completed"} 19.0' in metrics
        assert all(request.priority == BACKGROUND for request in house.engine.requests)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (jsonl([line("a")]) + b"{nonsense\n", "invalid_json_line", 2),
        (b"\xff\xfe\n", "invalid_json_line", 1),
        (b"[1]\n", "invalid_json_line", 1),
        (b"\n" + jsonl([line("a"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([{"url": CHAT, "body": {}}]), "missing_required_parameter", 1),
        (jsonl([line("a") | {"custom_id": 5}]), "invalid_custom_id", 1),
        (jsonl([line("a") | {"body": "text"}]), "invalid_body", 1),
        (jsonl([line("a") | {"method": "GET"}]), "invalid_method", 1),
        (jsonl([line("a", url="/v1/completions")]), "invalid_url", 1),
        (jsonl([line(str(n)) for n in range(6)]), "too_many_lines", 6),
        (jsonl([line("a", "x" * 3000), line("b")]), "line_too_long", 1),
    ],
)
def test_an_input_that_is_no_good_fails_with_the_line(
    tmp_path: Path, content: bytes, code: str, number: int | None
) -> None:
    async def run() -> None:
        house = house_at(tmp_path, saying("x"), max_batch_lines=5, max_body_bytes=2000)
        async with running(house.app) as app:
            file_id = (await upload(app, content)).json()["id"]
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            batch = await ended(app, (await ask(app, "/v1/batches", body)).json()["id"])
            assert batch["status"] == "failed"
            assert batch["failed_at"]
            (problem,) = batch["errors"]["data"]
            assert (problem["code"], problem["line"]) == (code, number)
            assert not house.engine.requests
        async with running(house_at(tmp_path, saying("x")).app) as app:
            assert (await get(app, f"/v1/batches/{batch['id']}")).json() == batch

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"endpoint": "/v1/nothing"}, 400, ["endpoint", "/v1/chat/completions", "/v1/responses", "/v1/completions"]),
        ({"completion_window": "soon"}, 400, ["completion_window", "24h"]),
        ({"completion_window": "31d"}, 400, ["completion_window", "30d"]),
        ({"input_file_id": "file-none"}, 404, ["file-none"]),
        ({"metadata": {"a": 1}}, 400, ["metadata.a"]),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, ["3600"]),
        ({"sooner": True}, 400, ["sooner"]),
    ],
)
def test_batches_that_can_not_be_are_refused(tmp_path: Path, change: Any, status: int, words: list[str]) -> None:
    async def run() -> None:
        async with running(house_at(tmp_path, saying("x")).app) as app:
            file_id = (await upload(app, jsonl([line("a")]))).json()["id"]
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"} | change
            error = (await ask(app, "/v1/batches", body)).error()
            assert error["code"] == status
            assert all(word in error["message"] for word in words), error["message"]

    asyncio.run(run())


def test_an_output_is_no_input(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(house_at(tmp_path, saying("x")).app) as app:
            batch = await ended(app, await begin(app, [line("a")]))
            body = {"input_file_id": batch["output_file_id"], "endpoint": CHAT, "completion_window": "24h"}
            assert (await ask(app, "/v1/batches", body)).error()["param"] == "input_file_id"

    asyncio.run(run())


def test_other_endpoints_and_what_has_no_place_in_a_batch(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(house_at(tmp_path, saying("x")).app) as app:
            lines = [
                {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": {"input": "hi"}},
                {
                    "custom_id": "2",
                    "method": "POST",
                    "url": "/v1/responses",
                    "body": {"input": "hi", "background": True},
                },
                {"custom_id": "3", "method": "POST", "url": "/v1/responses", "body": {"input": "hi", "stream": True}},
            ]
            batch = await ended(app, await begin(app, lines, endpoint="/v1/responses"))
            (one,) = await results(app, batch["output_file_id"])
            assert one["response"]["body"]["output"][0]["content"][0]["text"] == "x"
            errors = await results(app, batch["error_file_id"])
            assert [e["response"]["body"]["error"]["param"] for e in errors] == ["background", "stream"]

    asyncio.run(run())


def test_a_stopped_server_goes_on_where_it_was(tmp_path: Path) -> None:
    """Each line is asked of the engine until it has an answer on disk, and never again."""
    asked: Counter[str] = Counter()
    allowed = asyncio.Semaphore(0)

    def script(request: GenerateRequest) -> Sequence[int]:
        asked[bytes(token - 3 for token in request.tokens if token >= 3).hex()] += 1
        return ids("ok")

    async def pace() -> None:
        await allowed.acquire()

    async def run() -> None:
        lines = [line(f"c{number}", f"say {number}", max_tokens=1) for number in range(12)]
        async with running(house_at(tmp_path, script, pace, batch_concurrency=1).app) as app:
            batch_id = await begin(app, lines)
            batch = await service_of(app).get(batch_id)
            for _ in range(5):
                allowed.release()
            await eventually(lambda: len(batch.answered) == 5)
            await eventually(lambda: len(asked) == 6)
        assert journal_of(tmp_path, batch_id).exists()
        house = house_at(tmp_path, script, batch_concurrency=4)
        async with running(house.app) as app:
            done = await ended(app, batch_id)
            assert done["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
            assert [one["custom_id"] for one in await results(app, done["output_file_id"])] == [
                f"c{n}" for n in range(12)
            ]
        assert len(house.engine.requests) == 7
        assert sorted(asked.values()) == [1] * 11 + [2]  # the one that was cut short

    asyncio.run(run())


def test_a_crash_at_any_record_gives_the_same_output(tmp_path: Path) -> None:
    """Cut the journal after each record in turn, as a kill would, and let a new server finish."""

    async def run() -> None:
        lines = [line(f"c{number}", f"say {number}") for number in range(4)]
        recorded: list[bytes] = []
        app = house_at(tmp_path, echoing).app
        async with running(app):
            service = service_of(app)
            batch_id = await begin(app, lines)
            store = await service._opened()
            path, shorten = journal_of(tmp_path, batch_id), store._shorten
            store._shorten = lambda batch: (recorded.append(path.read_bytes()), shorten(batch))  # type: ignore[assignment, func-returns-value]
            whole = await ended(app, batch_id)
            wanted = [answer_of(one) for one in await results(app, whole["output_file_id"])]
        (journal,) = recorded
        ends = [place + 1 for place, byte in enumerate(journal) if byte == 10]
        assert len(ends) == 8  # created, begun, four answers, closing, ended
        for end in ends:
            path.write_bytes(journal[:end] + b'{"kind":"answ')
            house = house_at(tmp_path, echoing)
            async with running(house.app):
                again = await ended(house.app, batch_id)
                assert again["status"] == "completed"
                assert [answer_of(one) for one in await results(house.app, again["output_file_id"])] == wanted
                left = {0: 4, 1: 4, 2: 3, 3: 2, 4: 1}.get(ends.index(end), 0)
                assert len(house.engine.requests) == left
            assert path.stat().st_size < len(journal)

    asyncio.run(run())


def answer_of(result: dict[str, Any]) -> tuple[str, str]:
    return result["custom_id"], result["response"]["body"]["choices"][0]["message"]["content"]


def test_cancelling_keeps_what_was_answered(tmp_path: Path) -> None:
    allowed = asyncio.Semaphore(0)

    async def pace() -> None:
        await allowed.acquire()

    async def run() -> None:
        house = house_at(tmp_path, saying("x"), pace, batch_concurrency=2)
        async with running(house.app) as app:
            batch_id = await begin(app, [line(str(number), max_tokens=1) for number in range(9)])
            batch = await service_of(app).get(batch_id)
            for _ in range(3):
                allowed.release()
            await eventually(lambda: len(batch.answered) == 3 and len(house.engine.running) == 2)
            told = (await ask(app, f"/v1/batches/{batch_id}/cancel")).json()
            assert told["status"] in ("cancelling", "cancelled")
            done = await ended(app, batch_id)
            assert done["status"] == "cancelled"
            assert done["cancelling_at"] <= done["cancelled_at"]
            assert done["request_counts"] == {"total": 9, "completed": 3, "failed": 0}
            assert len(await results(app, done["output_file_id"])) == 3
            assert done["error_file_id"] is None
            await eventually(lambda: not house.engine.running)
            assert (await ask(app, f"/v1/batches/{batch_id}/cancel")).error()["code"] == 409

    asyncio.run(run())


def test_a_batch_that_ends_while_it_is_cancelled_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        house = house_at(tmp_path, saying("x"))
        async with running(house.app) as app:
            service = service_of(app)
            await service.files()
            begun, go = threading.Event(), threading.Event()
            assert service._store is not None
            finish = service._store.finish

            def late(*args: Any) -> None:
                begun.set()
                go.wait()
                finish(*args)

            monkeypatch.setattr(service._store, "finish", late)
            durably = service.durably

            async def ending(work: Callable[[], Any]) -> Any:
                """Let the disk's thread go on once the cancel is queued behind the end."""
                asyncio.get_running_loop().call_soon(go.set)
                return await durably(work)

            batch_id = await begin(app, [line("a")])
            await eventually(begun.is_set)
            monkeypatch.setattr(service, "durably", ending)
            refusal = (await ask(app, f"/v1/batches/{batch_id}/cancel")).error()
            assert (refusal["code"], refusal["param"]) == (409, "batch_id")
            done = await ended(app, batch_id)
            assert (done["status"], done["cancelling_at"]) == ("completed", None)
            await eventually(lambda: not service.active)

    asyncio.run(run())


def test_what_did_not_run_in_time_is_told(tmp_path: Path) -> None:
    never = asyncio.Event()

    async def run() -> None:
        async with running(house_at(tmp_path, saying("x"), never.wait).app) as app:
            batch = await ended(app, await begin(app, [line("a"), line("b")], window="1s"))
            assert batch["status"] == "expired"
            assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
            assert batch["output_file_id"] is None
            late = await results(app, batch["error_file_id"])
            assert [(one["custom_id"], one["response"], one["error"]["code"]) for one in late] == [
                ("a", None, "batch_expired"),
                ("b", None, "batch_expired"),
            ]

    asyncio.run(run())


def test_a_full_server_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.batch.execute._FIRST_WAIT_S", 0.001)

    async def run() -> None:
        house = house_at(tmp_path, saying("x"))
        async with running(house.app) as app:
            house.engine.die("gone")
            batch_id = await begin(app, [line("a")])
            batch = await service_of(app).get(batch_id)
            await eventually(lambda: batch.total == 1)
            assert not batch.answered
            house.engine._dead = None
            assert (await ended(app, batch_id))["request_counts"]["completed"] == 1

    asyncio.run(run())


def test_a_full_disk_holds_a_batch_up_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.server.batch.service._AFTER_FAULT_S", 0.001)
    full, looks = [True], []

    def fail(*_: Any) -> None:
        looks.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    def append(journal: Journal, record: bytes, append: Any = Journal.append) -> Any:
        return fail() if full and b"answered" in record else append(journal, record)

    def look(folder: Path) -> None:
        assert folder == tmp_path
        return fail() if full else None

    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr("octavo.server.batch.service.try_to_write", look)

    async def run() -> None:
        house = house_at(tmp_path, saying("x"))
        async with running(house.app) as app:
            batch_id = await begin(app, [line(str(number)) for number in range(20)])
            await eventually(lambda: len(looks) > 40)
            assert len(house.engine.requests) == 20  # nothing is computed in vain while the disk is full
            assert (await ask(app, CHAT, HELLO)).status == 200
            full.clear()
            assert (await ended(app, batch_id))["request_counts"]["completed"] == 20

    asyncio.run(run())
    (told,) = [record for record in caplog.records if record.name == "octavo.server.batch"]
    assert "No space left on device" in told.getMessage()
    assert told.exc_info is None


def test_batches_take_no_place_in_the_queue_of_others(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def run() -> None:
        house = house_at(tmp_path, saying("x"), gate.wait, max_num_queued_reqs=0, batch_concurrency=500)
        async with running(house.app) as app:
            batch_id = await begin(app, [line(str(number)) for number in range(300)])
            await eventually(lambda: len(house.engine.running) == 300)
            house.engine.current.num_waiting = 44  # the engine has 256 seats
            visitor = Visitor(app, CHAT, HELLO)
            await eventually(lambda: len(house.engine.running) == 301)
            gate.set()
            assert (await visitor.whole()).status == 200
            assert (await ended(app, batch_id))["request_counts"]["completed"] == 300

    asyncio.run(run())


def test_journals_of_ended_batches_are_short(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(house_at(tmp_path, saying("x")).app) as app:
            batch = await ended(app, await begin(app, [line(str(number), "x" * 500) for number in range(30)]))
        assert journal_of(tmp_path, batch["id"]).stat().st_size < 1500
        async with running(house_at(tmp_path, saying("x")).app) as app:
            assert (await get(app, f"/v1/batches/{batch['id']}")).json() == batch
            assert len(await results(app, batch["output_file_id"])) == 30

    asyncio.run(run())


def test_the_output_holds_one_json_object_a_line(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(house_at(tmp_path, saying("a\nb\u2028c")).app) as app:
            batch = await ended(app, await begin(app, [line("é\n", max_tokens=20)]))
            (data,) = (await get(app, f"/v1/files/{batch['output_file_id']}/content")).body.split(b"\n")[:-1]
            assert json.loads(data)["response"]["body"]["choices"][0]["message"]["content"] == "a\nb\u2028c"

    asyncio.run(run())
