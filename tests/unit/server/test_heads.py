"""What comes over the wire before a request is one: heads that are too slow, too large or none, and HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from server_kit import HELLO, running

from octavo.config import ServerConfig
from octavo.server.process.head import MAX_HEAD
from octavo.server.process.seldom import Seldom

CHAT = b"/v1/chat/completions"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
LAST = b"Connection: close\r\n\r\n"


def talk(visit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]], timeout: float = 60) -> bytes:
    """What a connection to a new server came to."""

    async def scenario() -> bytes:
        config = ServerConfig(port=0, log_stats_interval_s=0, body_timeout_s=timeout)
        async with running(config) as (_, sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            try:
                return await visit(reader, writer)
            finally:
                writer.close()

    return asyncio.run(scenario())


def sending(*parts: bytes, timeout: float = 60) -> bytes:
    """All that the server says until it closes the connection."""

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        return await reader.read()

    return talk(visit, timeout)


def post(version: bytes, **changes: object) -> bytes:
    body = json.dumps(HELLO | changes).encode()
    return b"POST %s HTTP/%s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (
        CHAT,
        version,
        len(body),
    ) + (b"\r\n" + body)


def error_of(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    error = json.loads(body)["error"]
    assert error["code"] == status
    return str(error["message"])


def test_who_does_not_finish_a_head_is_not_waited_for() -> None:
    assert sending(timeout=0.1) == b""
    for begun in (GET, b"\r\n"):
        assert "--body-timeout" in error_of(sending(begun, timeout=0.1), 408)
    for begun in (GET + b"\r\n" + GET, post(b"1.1") + b"POST"):
        assert sending(begun, timeout=0.1).startswith(b"HTTP/1.1 200 OK")


def test_an_idle_connection_may_stay_longer_than_a_head() -> None:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(GET + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.4)
        writer.write(GET + LAST)
        return await reader.read()

    assert b" 200 OK" in talk(visit, 0.1)


def test_headers_without_end_are_refused() -> None:
    answer = sending(GET, b"X: " + b"y" * MAX_HEAD)
    assert f"{MAX_HEAD:,} bytes" in error_of(answer, 431)


@pytest.mark.parametrize("rest", [b"", b"\r\n".join([b"", GET + LAST])])
def test_large_headers_are_refused_in_however_few_pieces_they_come(rest: bytes) -> None:
    answer = sending(GET + b"X: " + b"y" * MAX_HEAD + b"\r\n\r\n" + rest)
    assert f"{MAX_HEAD:,} bytes" in error_of(answer, 431)
    assert b" 200 OK" in sending(GET + b"X: " + b"y" * (MAX_HEAD - 100) + b"\r\n" + LAST)


def test_a_large_body_behind_its_head_is_none() -> None:
    pad = b" " * 3 * MAX_HEAD
    body = pad + json.dumps(HELLO).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (
        CHAT,
        len(body),
    )
    answer = sending(head + b"\r\n" + body + head + LAST + body)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("words", [b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"hello\r\n\r\n"])
def test_what_is_no_http_gets_the_same_error_object(words: bytes) -> None:
    assert "RFC 9112" in error_of(sending(words), 400)


@pytest.mark.parametrize("cut", [0, 1, 30, 400])
def test_an_offer_of_http_2_is_passed_over(cut: int) -> None:
    """Java's client makes it with its first request, which has a body like any other."""
    offer = b" HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    words = post(b"1.1").replace(b" HTTP/1.1\r\n", offer)
    answer = sending(words[:cut], words[cut:] + words.replace(b"Upgrade, ", b"close, Upgrade, "))
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.count(b'"content":"Bonjour"') == 2


def test_a_websocket_is_opened_by_get_only() -> None:
    offer = b" HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    answer = sending(post(b"1.1").replace(b" HTTP/1.1\r\n", offer))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"content":"Bonjour"' in answer


@pytest.mark.parametrize("rest", [b"x", b"x" * 99], ids=["unfinished", "finished"])
def test_the_body_of_a_request_that_was_answered_early_keeps_no_connection(rest: bytes) -> None:
    async def scenario() -> None:
        config = ServerConfig(port=0, log_stats_interval_s=0, keep_alive_s=1)
        async with running(config) as (_, sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx")
            assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(rest)
            await asyncio.wait_for(reader.read(), 30)
            writer.close()

    asyncio.run(scenario())


def test_a_request_within_whose_head_the_previous_response_ended_may_take_its_time() -> None:
    async def scenario() -> bytes:
        config = ServerConfig(port=0, log_stats_interval_s=0, keep_alive_s=1)
        async with running(config) as (_, sock):
            reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
            writer.write(GET + b"\r\n" + post(b"1.1")[:20])
            await reader.readuntil(b"}")
            words = post(b"1.1").replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
            writer.write(words[20:-1])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(), 1.5)  # longer than an idle connection may
            writer.write(words[-1:])
            answer = await reader.read()
            writer.close()
            return answer

    assert b'"content":"Bonjour"' in asyncio.run(scenario())


def test_nobody_is_connected_elsewhere() -> None:
    assert error_of(sending(b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n"), 400)


def test_http_1_0_gets_no_chunks() -> None:
    answer = sending(post(b"1.0", stream=True))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    whole = sending(post(b"1.0"))
    assert json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "Bonjour"


def test_what_clients_send_fills_no_log(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(ServerConfig(port=0, log_stats_interval_s=0, jobs_dir=str(tmp_path))) as (_, sock):
            for sent in (b"\x00\x01\r\n\r\n", b"\x16\x03\x01\x00\xff\x01") * 20:
                reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
                writer.write(sent)
                assert b"400" in await reader.read()
                writer.close()

    asyncio.run(scenario())
    assert len(caplog.messages) == 2
    assert "(127.0.0.1) sent an invalid HTTP request" in caplog.messages[0]
    assert "--ssl-certfile" in caplog.messages[1]


def test_the_next_line_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    clock = [1000.0]
    log = Seldom(logging.getLogger("octavo.server"), lambda: clock[0])
    for _ in range(3):
        log.warning("%s did this.", "one")
        log.warning("All of them did that.")
    clock[0] += 60
    log.warning("%s did this.", "two")
    log.warning("%s did this.", "three")
    assert caplog.messages == [
        "one did this.",
        "All of them did that.",
        "two did this. (And 2 more like this before.)",
    ]
