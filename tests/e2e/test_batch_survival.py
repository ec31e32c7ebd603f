"""Batches and the sudden death of servers, with real processes, real files and the openai client."""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import Server, wait_until

pytestmark = pytest.mark.e2e

STUB = Path(__file__).with_name("stub_server.py")
CHAT = "/v1/chat/completions"


def line(number: int, content: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture
def start_stub(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Starts servers over a stub, one after the other over one folder."""
    started: list[Server] = []

    def start() -> Server:
        log = tmp_path / f"log-{len(started)}"
        flags = ("--jobs-dir", str(tmp_path / "jobs"), "--batch-concurrency", "4")
        server = Server("", log, *flags, command=[sys.executable, str(STUB), "0.002"])
        started.append(server)
        server.wait_ready()
        return server

    try:
        yield start
    finally:
        for server in started:
            server.close()


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_no_line_is_lost_or_answered_twice_when_servers_are_killed(start_stub: Callable[[], Server]) -> None:
    count = 200
    server = start_stub()
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl([line(n, "hi") for n in range(count)])), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    seen = 0

    def answered(running: Server, wanted: int) -> bool:
        nonlocal seen
        now = running.http.get(f"/v1/batches/{batch.id}").json()["request_counts"]["completed"]
        assert now >= seen, "an answer that was told is gone"
        seen = now
        return seen >= wanted

    for share in sorted(random.Random(4).sample(range(5, 90), 3)):
        wait_until(partial(answered, server, count * share // 100), f"{share} % of the lines")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = start_stub()
    with client_of(server) as client:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the end of the batch")
        done = client.batches.retrieve(batch.id)
        assert done.request_counts is not None
        assert (done.request_counts.total, done.request_counts.completed) == (count, count)
        assert done.error_file_id is None
        assert done.output_file_id is not None
        results = [json.loads(one) for one in client.files.content(done.output_file_id).iter_lines()]
    assert [one["custom_id"] for one in results] == [f"c{n}" for n in range(count)]
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in results} == {"The"}
    assert server.stop() == 0


def test_the_openai_client_runs_a_batch(server: Server) -> None:
    lines = [line(n, f"What is the capital of {country}?") for n, country in enumerate(("France", "Italy"))]
    for one in lines:
        one["body"] |= {"model": "smollm2", "max_tokens": 16}
    wrong = line(2, "hi")
    wrong["body"]["model"] = "other"
    with client_of(server) as client:
        file = client.files.create(file=("in.jsonl", jsonl([*lines, wrong])), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"test": "yes"}
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the end of the batch")
        batch = client.batches.retrieve(batch.id)
        assert batch.metadata == {"test": "yes"}
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        results = [json.loads(one) for one in client.files.content(batch.output_file_id).iter_lines()]
        assert "Paris" in str(results[0])
        for result, asked in zip(results, lines, strict=True):
            text = result["response"]["body"]["choices"][0]["message"]["content"]
            assert client.chat.completions.create(**asked["body"]).choices[0].message.content == text
        (error,) = [json.loads(one) for one in client.files.content(batch.error_file_id).iter_lines()]
        assert (error["custom_id"], error["response"]["status_code"]) == ("c2", 404)
        assert batch.id in [one.id for one in client.batches.list()]
        assert {file.id, batch.output_file_id} <= {one.id for one in client.files.list()}
        assert client.files.retrieve(file.id).purpose == "batch"
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
