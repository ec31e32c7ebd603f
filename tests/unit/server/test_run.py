"""The server over real sockets, in this process: it binds, answers, drains and stops."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_kit import HELLO, eventually, make_frontend, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError, ModelNotFoundError
from octavo.engine.fake import FakeEngine, Script, fake_info
from octavo.server.process import serving
from octavo.server.process.address import bind
from octavo.server.process.run import raise_open_files, run_server
from octavo.server.process.serving import serve
from octavo.server.process.stop import Stop
from octavo.text.frontend import Frontend

CHAT = "/v1/chat/completions"


class Running:
    """A server in this process, and clients for it."""

    def __init__(self, engine: FakeEngine, stop: Stop, task: asyncio.Task[None], url: str, line: str) -> None:
        self.engine = engine
        self.stop = stop
        self.task = task
        self.url = url
        self.line = line

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120)


@asynccontextmanager
async def running(
    script: Script, pace: Callable[[], Awaitable[None]] | None = None, **config: Any
) -> AsyncIterator[Running]:
    settings = ServerConfig(**{"port": 0, "log_stats_interval_s": 0, **config})
    engine = FakeEngine(script, info=fake_info(name="toy", vocab_size=259), pace=pace)
    sock = bind(settings)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    lines: asyncio.Queue[str] = asyncio.Queue()
    stop = Stop()
    task = asyncio.create_task(serve(make_frontend(engine), settings, sock=sock, announce=lines.put_nowait, stop=stop))
    async with asyncio.timeout(240):
        line = await lines.get()
        try:
            yield Running(engine, stop, task, url, line)
        finally:
            stop.request()
            stop.request()
            await task


def test_it_says_where_it_is_and_answers() -> None:
    async def scenario() -> None:
        async with running(saying("Bonjour")) as server, server.client() as client:
            assert server.url in server.line
            assert f"curl {server.url}{CHAT}" in server.line
            answer = await client.post(CHAT, json=HELLO)
            assert answer.json()["choices"][0]["message"]["content"] == "Bonjour"
            assert "server" not in answer.headers

    asyncio.run(scenario())


def test_the_openai_client_talks_to_it() -> None:
    async def scenario() -> None:
        async with running(saying("Bonjour\u2028 à tous\r\n")) as server:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            async with client:
                assert [model.id async for model in client.models.list()] == ["toy"]
                chat: dict[str, Any] = {"model": "toy", "messages": HELLO["messages"]}
                whole = await client.chat.completions.create(**chat)
                said = whole.choices[0].message.content
                assert said == "Bonjour\u2028 à tous\r\n"
                assert whole.choices[0].finish_reason == "stop"
                stream = await client.chat.completions.create(
                    **chat, stream=True, stream_options={"include_usage": True}, n=2, extra_body={"top_k": 5}
                )
                chunks = [chunk async for chunk in stream]
                for index in range(2):
                    pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index]
                    assert "".join(pieces) == said
                assert chunks[-1].usage is not None
                assert chunks[-1].usage.completion_tokens == 2 * (len(said.encode()) + 1)
                text = await client.completions.create(model="toy", prompt=["a", "b"], max_tokens=7, logprobs=1)
                assert [choice.text for choice in text.choices] == ["Bonjour", "Bonjour"]
                parts = await client.completions.create(model="toy", prompt="a", max_tokens=7, stream=True)
                assert "".join([part.choices[0].text async for part in parts]) == "Bonjour"
                with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
                    await client.chat.completions.create(**chat, temperature=-1)
                with pytest.raises(openai.NotFoundError, match="`gpt` does not exist"):
                    await client.chat.completions.create(**chat | {"model": "gpt"})

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_the_request(stream: bool) -> None:
    async def scenario() -> None:
        forever = asyncio.Event()
        async with running(saying("x"), forever.wait) as server:  # type: ignore[arg-type]
            async with server.client() as client:
                asking = asyncio.create_task(client.post(CHAT, json=HELLO | {"stream": stream}))
                await eventually(lambda: len(server.engine.running) == 1)
                asking.cancel()
                await asyncio.wait([asking])
            await eventually(lambda: not server.engine.running)
            assert len(server.engine.abandoned) == 1

    asyncio.run(scenario())


def test_a_huge_body_is_answered_and_the_connection_lives_on() -> None:
    async def scenario() -> None:
        async with running(saying("fine"), max_body_bytes=1_000_000) as server, server.client() as client:
            body = b'{"messages": "' + b"x" * 50_000_000 + b'"}'

            async def parts() -> AsyncIterator[bytes]:
                for start in range(0, len(body), 1_000_000):
                    yield body[start : start + 1_000_000]

            json_type = {"Content-Type": "application/json"}
            for content in (body, parts()):
                answer = await client.post(CHAT, content=content, headers=json_type)
                assert answer.status_code == 413
                assert "--max-body-bytes" in answer.json()["error"]["message"]
                assert (await client.post(CHAT, json=HELLO)).status_code == 200

    asyncio.run(scenario())


def test_stopping_lets_requests_finish() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(2)
        async with running(saying("abc"), steps.acquire) as server, server.client() as client:  # type: ignore[arg-type]
            asking = asyncio.create_task(client.post(CHAT, json=HELLO))
            await eventually(lambda: len(server.engine.running) == 1)
            server.stop.request()
            ready = await client.get("/ready")
            while ready.status_code == 200:
                ready = await client.get("/ready")
            assert ready.status_code == 503
            assert (await client.post(CHAT, json=HELLO)).status_code == 503
            assert not server.task.done()
            for _ in range(5):
                steps.release()
            assert (await asking).json()["choices"][0]["message"]["content"] == "abc"
            await server.task
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_finish_in_time_is_aborted_and_told_so(stream: bool) -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(3)
        server_settings = {"shutdown_timeout_s": 0.01}
        async with (
            running(saying("abcdef"), steps.acquire, **server_settings) as server,  # type: ignore[arg-type]
            server.client() as client,
        ):
            asking = asyncio.create_task(client.post(CHAT, json=HELLO | {"stream": stream}))
            await eventually(lambda: len(server.engine.running) == 1)
            server.stop.request()
            answer = await asking
            assert answer.status_code == 200
            assert '"finish_reason":"abort"' in answer.text
            await server.task

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_who_waits_for_an_engine_that_hangs_is_told_when_the_server_stops(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "_AFTER_ABORT_S", 0.01)

    async def scenario() -> None:
        held = asyncio.Semaphore(1)

        async def deaf(request_id: str, index: int | None = None) -> None:
            """It hangs: no abort reaches it."""

        async with running(saying("abc"), pace=held.acquire, shutdown_timeout_s=0) as server:  # type: ignore[arg-type]
            server.engine.abort = deaf  # type: ignore[method-assign]
            async with server.client() as client:
                asking = asyncio.create_task(client.post(CHAT, json=HELLO | {"stream": stream}))
                await eventually(lambda: any(server.engine.received(one).tokens for one in server.engine.running))
                server.stop.request()
                answer = await asking
            assert answer.status_code == (200 if stream else 503)
            assert "The engine was closed." in answer.text
            await server.task
        assert "Exception in ASGI" not in caplog.text

    asyncio.run(scenario())


def test_a_second_signal_ends_at_once() -> None:
    async def scenario() -> None:
        forever = asyncio.Event()
        async with running(saying("x"), forever.wait) as server, server.client() as client:  # type: ignore[arg-type]
            asking = asyncio.create_task(client.post(CHAT, json=HELLO))
            await eventually(lambda: len(server.engine.running) == 1)
            server.stop.request()
            server.stop.request()
            await server.task
            assert not server.engine.running
            await asyncio.wait([asking])
            _ = asking.exception()

    asyncio.run(scenario())


def test_addresses_that_can_not_be_had() -> None:
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Port {port} is in use .* --port"):
            bind(ServerConfig(port=port))
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerConfig(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match="--host"):
        bind(ServerConfig(host="no such host.invalid", port=0))


@asynccontextmanager
async def _never_opened() -> AsyncIterator[Frontend]:
    raise AssertionError("the engine must not be started")
    yield


def test_a_port_in_use_is_one_line_before_the_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with bind(ServerConfig(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert run_server(_never_opened, ServerConfig(port=port)) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert str(port) in error
    assert "--port" in error


def test_a_model_that_can_not_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @asynccontextmanager
    async def missing() -> AsyncIterator[Frontend]:
        raise ModelNotFoundError("There is no model `x`; run octavo pull.")
        yield

    assert run_server(missing, ServerConfig(port=0)) == 1
    assert capsys.readouterr().err.splitlines() == ["octavo: error: There is no model `x`; run octavo pull."]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_the_server_and_close_the_engine(number: signal.Signals) -> None:
    engine = FakeEngine(saying("x"), info=fake_info(name="toy", vocab_size=259))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Frontend]:
        try:
            yield make_frontend(engine)
        finally:
            await engine.close()

    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        signal.raise_signal(number)

    assert run_server(opened, ServerConfig(port=0, log_stats_interval_s=0), announce=announce) == 0
    assert len(lines) == 1
    assert engine.closed


def test_a_signal_while_the_engine_starts_ends_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Frontend]:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
            yield make_frontend(FakeEngine(saying("x")))
        finally:
            closed.append(True)

    assert run_server(slow, ServerConfig(port=0)) == 128 + signal.SIGTERM
    assert closed == [True]
    assert "stopped" in capsys.readouterr().err


def test_a_server_whose_engine_has_died_answers_what_it_has_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    held = asyncio.Event()
    engine = FakeEngine(saying("x" * 9), info=fake_info(name="toy", vocab_size=259), pace=lambda: held.wait())
    answers: list[httpx.Response] = []

    @asynccontextmanager
    async def opened() -> AsyncIterator[Frontend]:
        yield make_frontend(engine)

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
            while not engine.requests:
                await asyncio.sleep(0)
            engine.die("The engine core was killed by SIGKILL.")
            held.set()
            answers.append(await asking)

    asking: list[asyncio.Task[None]] = []

    def announce(line: str) -> None:
        asking.append(asyncio.get_running_loop().create_task(ask(line.split()[5])))

    assert run_server(opened, ServerConfig(port=0, log_stats_interval_s=0), announce=announce) == 1
    assert answers[0].status_code == 503
    assert "killed by SIGKILL" in answers[0].json()["error"]["message"]
    assert "octavo: error: The engine core was killed by SIGKILL." in capsys.readouterr().err


def test_the_limit_on_open_files_is_raised_as_far_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, wanted in (((64, 4096), (4096, 4096)), ((64, 1 << 30), (65536, 1 << 30)), ((70000, 1 << 30), None)):
        limits = []
        monkeypatch.setattr(resource, "getrlimit", lambda _, given=given: given)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limit, limits=limits: limits.append(limit))
        raise_open_files()
        assert limits == ([wanted] if wanted else [])


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def scenario() -> None:
        try:
            sock = bind(ServerConfig(host="::1", port=0))
        except ConfigError:
            pytest.skip("this machine has no IPv6 loopback")
        lines: asyncio.Queue[str] = asyncio.Queue()
        stop = Stop()
        engine = FakeEngine(saying("x"), info=fake_info(name="toy", vocab_size=259))
        task = asyncio.create_task(
            serve(make_frontend(engine), ServerConfig(), sock=sock, announce=lines.put_nowait, stop=stop)
        )
        assert f"http://[::1]:{sock.getsockname()[1]}" in await lines.get()
        stop.request()
        await task

    asyncio.run(scenario())


def test_a_folder_for_files_that_can_not_be_one_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_server(_never_opened, ServerConfig(port=0, jobs_dir=str(tmp_path / "file"))) == 1
    told = capsys.readouterr().err
    assert "--jobs-dir" in told
    assert "give a folder that can be written to" in told


def test_a_closed_terminal_ends_the_server_in_order_unless_nohup_says_otherwise() -> None:
    async def scenario(ignored: bool) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        with Stop().listening() as stop:
            if ignored:
                assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
                return
            os.kill(os.getpid(), signal.SIGHUP)
            await stop.first.wait()
            stop.request(signal.SIGHUP)
            assert not stop.second.is_set()
            stop.request(signal.SIGTERM)
            assert stop.second.is_set()

    before = signal.getsignal(signal.SIGHUP)
    try:
        for ignored in (True, False):
            asyncio.run(scenario(ignored))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_ends_a_server_that_was_started_in_the_background() -> None:
    """There, shells without job control have it ignored."""

    async def scenario() -> None:
        with Stop().listening() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(10):
                await stop.first.wait()

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGINT, before)
