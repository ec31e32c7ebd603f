"""Real sockets: clients that do not read what they asked for, and WebSockets."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets.sync.client
from serving import WAIT_S, Server, wait_until

pytestmark = pytest.mark.e2e

STUB = Path(__file__).with_name("stub_server.py")
LIMIT = 100


def started(log: Path, *flags: str) -> Iterator[Server]:
    flags = ("--max-unread-tokens", str(LIMIT), *flags)
    server = Server("", log, *flags, command=[sys.executable, str(STUB), "0.0001"])
    try:
        server.wait_ready()
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It closes connections that take nothing for three seconds."""
    yield from started(tmp_path_factory.mktemp("stub") / "log", "--unread-timeout", "3")


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It closes no connection of a client that is slow because the machine is."""
    yield from started(tmp_path_factory.mktemp("patient") / "log", "--unread-timeout", "600")


def ask(server: Server, max_tokens: int) -> socket.socket:
    """A stream on a socket that holds next to nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "Go on", "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    return sock


def test_one_that_never_reads_is_given_up_and_costs_the_others_nothing(stub: Server) -> None:
    with ask(stub, 90_000):
        wait_until(lambda: stub.metric("octavo:slow_readers_total", outcome="request_ended") == 1, "the limit")
        wait_until(lambda: stub.metric("octavo:num_requests_running") == 0, "the end of its request")
        answer = stub.http.post("/v1/completions", json={"prompt": "Go on", "max_tokens": 2000})
        assert answer.json()["usage"]["completion_tokens"] == 2000
        wait_until(lambda: stub.metric("octavo:slow_readers_total", outcome="connection_closed") == 1, "the timeout")
    assert "reads too slowly" in stub.output()


def test_one_that_reads_late_gets_what_there_is_and_the_reason(patient: Server) -> None:
    with ask(patient, 90_000) as sock:
        wait_until(lambda: patient.metric("octavo:slow_readers_total", outcome="request_ended") == 1, "the limit")
        sock.settimeout(WAIT_S)
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            part = sock.recv(1 << 20)
            assert part
            data += part
    events = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["type"]) == (408, "RequestTimeoutError")
    assert "--max-unread-tokens" in error["message"]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-2])
    assert len(text) > LIMIT
    assert ("The quick brown fox jumps over the lazy dog. " * (len(text) // 45 + 1)).startswith(text)


def test_a_websocket_carries_several_streams(patient: Server) -> None:
    with websockets.sync.client.connect(f"ws://127.0.0.1:{patient.port}/v1/stream") as socket:

        def begin(name: str, max_tokens: int) -> None:
            body = {"prompt": "Go on", "max_tokens": max_tokens}
            socket.send(json.dumps({"type": "request", "id": name, "url": "/v1/completions", "body": body}))

        begin("a", 45)
        begin("long", 90_000)
        begin("b", 90)
        texts = {"a": "", "b": "", "long": ""}
        ends: dict[str, str] = {}
        while len(ends) < 3:
            message = json.loads(socket.recv(timeout=WAIT_S))
            if message["type"] == "chunk":
                texts[message["id"]] += message["chunk"]["choices"][0]["text"]
            else:
                ends[message["id"]] = message["type"]
                if len(ends) == 2:
                    socket.send(json.dumps({"type": "cancel", "id": "long"}))
        assert ends == {"a": "done", "b": "done", "long": "cancelled"}
        sentence = "The quick brown fox jumps over the lazy dog. "
        assert (texts["a"], texts["b"]) == (sentence, 2 * sentence)
        assert (sentence * 2001).startswith(texts["long"])
    wait_until(lambda: patient.metric("octavo:num_requests_running") == 0, "the end of all")


@pytest.mark.slow
def test_a_websocket_that_is_never_read_is_closed(stub: Server) -> None:
    name = "octavo:slow_readers_total"
    ended, closed = (stub.metric(name, outcome=one) for one in ("request_ended", "connection_closed"))
    with socket.socket() as sock, contextlib.ExitStack() as held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", stub.port))
        url = f"ws://127.0.0.1:{stub.port}/v1/stream"
        quiet = held.enter_context(websockets.sync.client.connect(url, sock=sock, max_queue=1, close_timeout=0.1))
        for number in range(4):
            body = {"prompt": "Go on", "max_tokens": 90_000}
            asked = {"type": "request", "id": str(number), "url": "/v1/completions", "body": body}
            quiet.send(json.dumps(asked))
        wait_until(lambda: stub.metric(name, outcome="request_ended") == ended + 4, "the limit")
        wait_until(lambda: stub.metric(name, outcome="connection_closed") == closed + 1, "the timeout")
    wait_until(lambda: stub.metric("octavo:num_requests_running") == 0, "the end of all")
