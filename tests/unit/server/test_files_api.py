from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from batch_kit import begin, form, get, jsonl, line, running, service_of, upload
from fastapi import FastAPI
from server_kit import ask, make_house, saying

from octavo.config import ServerConfig
from octavo.server.batch.files import FileStore


def visit(folder: Path, work: Callable[[FastAPI], Awaitable[None]], **settings: object) -> None:
    async def run() -> None:
        config = ServerConfig(jobs_dir=str(folder), **settings)  # type: ignore[arg-type]
        async with running(make_house(saying("ok"), config).app) as app:
            await work(app)

    asyncio.run(run())


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000  # more than is held in memory

    async def work(app: FastAPI) -> None:
        facts = (await upload(app, content, **{"expires_after[anchor]": "created_at"})).json()
        assert facts["bytes"] == len(content)
        assert facts["filename"] == "in.jsonl"
        assert (facts["object"], facts["purpose"], facts["expires_at"]) == ("file", "batch", None)
        assert (await get(app, f"/v1/files/{facts['id']}")).json() == facts
        got = await get(app, f"/v1/files/{facts['id']}/content")
        assert got.body == content
        assert (await get(app, "/v1/files")).json()["data"] == [facts]

    visit(tmp_path, work)

    async def after_a_restart(app: FastAPI) -> None:
        (facts,) = (await get(app, "/v1/files")).json()["data"]
        assert (await get(app, f"/v1/files/{facts['id']}/content")).body == content
        gone = await ask(app, f"/v1/files/{facts['id']}", method="DELETE")
        assert gone.json() == {"id": facts["id"], "object": "file", "deleted": True}
        assert (await get(app, f"/v1/files/{facts['id']}")).error()["code"] == 404
        assert (await get(app, f"/v1/files/{facts['id']}/content")).status == 404

    visit(tmp_path, after_a_restart)
    assert not list((tmp_path / "files").iterdir())


def test_nothing_is_made_on_disk_until_a_file_comes(tmp_path: Path) -> None:
    async def work(app: FastAPI) -> None:
        assert not (tmp_path / "jobs").exists()

    visit(tmp_path / "jobs", work)


def test_uploads_that_are_no_good_say_why(tmp_path: Path) -> None:
    async def work(app: FastAPI) -> None:
        async def refused(body: bytes, headers: dict[str, str], status: int, *words: str) -> None:
            error = (await ask(app, "/v1/files", body, headers=headers)).error()
            assert error["code"] == status
            assert all(word in error["message"] for word in words), error["message"]

        body, headers = form(b"x", purpose="fine-tune")
        await refused(body, headers, 400, "purpose", "fine-tune", "batch")
        body, headers = form(b"x")
        await refused(body, headers, 400, "purpose", "required")
        await refused(b"{}", {"content-type": "application/json"}, 415, "multipart/form-data")
        await refused(body, {"content-type": "multipart/form-data"}, 400, "boundary")
        await refused(b"rubbish", headers, 400, "form")
        missing = b'--XX\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--XX--\r\n'
        await refused(missing, headers, 400, "file")
        body, headers = form(b"x" * 1001, purpose="batch")
        await refused(body, headers, 413, "1,000", "--max-file-bytes")
        big, headers = form(b"x" * 200_000, purpose="batch")
        await refused(big, headers, 413, "1,000")
        body, headers = form(b"x", purpose="batch", **{"expires_after[seconds]": "5"})
        await refused(body, headers, 400, "3600")
        assert (await get(app, "/v1/files")).json()["data"] == []

    visit(tmp_path, work, max_file_bytes=1000)
    assert not list((tmp_path / "files").iterdir())


def test_lists_come_in_pages(tmp_path: Path) -> None:
    async def work(app: FastAPI) -> None:
        names = {(await upload(app, b"x")).json()["id"] for _ in range(5)}
        first = (await get(app, "/v1/files?limit=2")).json()
        rest = (await get(app, f"/v1/files?limit=10&after={first['last_id']}")).json()
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert {one["id"] for one in first["data"] + rest["data"]} == names
        assert len(rest["data"]) == 3
        assert (await get(app, "/v1/files?purpose=batch_output")).json()["data"] == []
        for query in ("limit=0", "limit=x", "after=nobody", "order=up"):
            assert (await get(app, f"/v1/files?{query}")).error()["code"] == 400

    visit(tmp_path, work)


def test_files_go_when_their_time_has_come(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(tmp_path, now=lambda: now[0])
    store.load()
    for name, lifetime in (("a", 10), ("b", None), ("c", 10)):
        store.draft(name).write_bytes(b"x")
        store.put(name, filename=name, purpose="batch", lifetime_s=lifetime)
    now[0] = 1010.0
    assert [facts.id for facts in store.list()] == ["b"]
    store.sweep(keep=frozenset({"c"}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.data", "b.json", "c.data", "c.json"]


def test_what_a_crash_left_half_done_is_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.load()
    store.draft("a").write_bytes(b"x")
    store.put("a", filename="a", purpose="batch")
    (tmp_path / "b.data").write_bytes(b"no facts yet")
    (tmp_path / "c.draft").write_bytes(b"half")
    (tmp_path / "d.json.part").write_bytes(b"half")
    again = FileStore(tmp_path)
    again.load()
    assert [facts.id for facts in again.list()] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.data", "a.json"]


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    async def work(app: FastAPI) -> None:
        await upload(app, b"x")
        other = make_house(saying("ok"), ServerConfig(jobs_dir=str(tmp_path))).app
        async with running(other):
            error = (await upload(other, b"x")).error()
            assert error["code"] == 503
            assert "--jobs-dir" in error["message"]

    visit(tmp_path, work)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    async def work(app: FastAPI) -> None:
        error = (await upload(app, b"x")).error()
        assert error["code"] == 503
        assert "--jobs-dir" in error["message"]

    visit(tmp_path / "file" / "jobs", work)


def test_a_file_that_a_batch_reads_stays(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def run() -> None:
        app = make_house(saying("ok"), ServerConfig(jobs_dir=str(tmp_path)), pace=gate.wait).app
        async with running(app):
            batch_id = await begin(app, [line("a")])
            file_id = (await service_of(app).get(batch_id)).created.input_file_id
            error = (await ask(app, f"/v1/files/{file_id}", method="DELETE")).error()
            assert error["code"] == 409
            assert (await get(app, f"/v1/files/{file_id}/content")).body == jsonl([line("a")])

    asyncio.run(run())


def test_keys_guard_files_too(tmp_path: Path) -> None:
    async def work(app: FastAPI) -> None:
        assert (await upload(app, b"x")).error()["code"] == 401
        assert (await get(app, "/v1/batches")).error()["code"] == 401

    visit(tmp_path, work, api_keys=("k",))


@pytest.mark.parametrize("path", ["/v1/files/file-x", "/v1/files/file-x/content", "/v1/batches/batch_x"])
def test_what_is_not_there_is_told(tmp_path: Path, path: str) -> None:
    async def work(app: FastAPI) -> None:
        assert (await get(app, path)).error()["code"] == 404

    visit(tmp_path, work)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def work(app: FastAPI) -> None:
        file_id = (await upload(app, jsonl([line("a")]))).json()["id"]
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            error = (await upload(app, b"x")).error()
            assert (error["code"], error["type"]) == (507, "InsufficientStorage")
            assert "No space" in error["message"]
            body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            assert (await ask(app, "/v1/batches", body)).error()["code"] == 507
        assert [one["id"] for one in (await get(app, "/v1/files")).json()["data"]] == [file_id]
        assert (await get(app, "/v1/batches")).json()["data"] == []

    visit(tmp_path, work)
    assert len(list((tmp_path / "files").iterdir())) == 2
    assert not list((tmp_path / "batches").iterdir())
