"""Where and how the server listens: TLS, socket files, limits on what visitors may hold."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_kit import HELLO, Visitor, ask, ask_now, eventually, make_house, running, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.server.process.address import bind, release
from octavo.server.process.run import run_server
from octavo.server.process.tls import check_tls, load_certificate, refresh

CHAT = "/v1/chat/completions"
DATA = Path(__file__).parents[2] / "data"
FIRST, SECOND = str(DATA / "tls_first.pem"), str(DATA / "tls_second.pem")


def trusting(path: str, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=path)
    if client is not None:
        context.load_cert_chain(client)
    return context


def test_it_serves_tls_and_says_so() -> None:
    async def scenario() -> None:
        async with running(ServerConfig(port=0, log_stats_interval_s=0, ssl_certfile=FIRST)) as (line, sock):
            assert "in a browser" in line
            url = f"https://127.0.0.1:{sock.getsockname()[1]}"
            assert f"curl {url}{CHAT}" in line
            async with httpx.AsyncClient(verify=trusting(FIRST), timeout=120) as client:
                answer = await client.post(url + CHAT, json=HELLO)
            assert answer.json()["choices"][0]["message"]["content"] == "Bonjour"
            async with httpx.AsyncClient(timeout=120) as stranger:
                with pytest.raises(httpx.ConnectError, match="certificate"):
                    await stranger.get(url + "/health")

    asyncio.run(scenario())


def test_clients_may_have_to_show_a_certificate() -> None:
    config = ServerConfig(
        port=0, log_stats_interval_s=0, ssl_certfile=FIRST, ssl_ca_certs=SECOND, ssl_cert_reqs=ssl.CERT_REQUIRED
    )

    async def scenario() -> None:
        async with running(config) as (_, sock):
            url = f"https://127.0.0.1:{sock.getsockname()[1]}/health"
            async with httpx.AsyncClient(verify=trusting(FIRST, SECOND), timeout=120) as known:
                assert (await known.get(url)).status_code == 200
            async with httpx.AsyncClient(verify=trusting(FIRST), timeout=120) as unknown:
                with pytest.raises(httpx.TransportError):
                    await unknown.get(url)

    asyncio.run(scenario())


def certificate_of(context: ssl.SSLContext) -> bytes:
    """What a server with this context shows in a handshake, which happens in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(*ways), context.wrap_bio(*ways[::-1], server_side=True)
    for _ in range(8):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_a_new_certificate_is_taken_up_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "server.pem"
    shutil.copy(FIRST, path)
    config = ServerConfig(ssl_certfile=str(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, config)
    first = certificate_of(context)

    async def scenario() -> None:
        watching = asyncio.create_task(refresh(context, config, look_s=0))
        await asyncio.sleep(0)  # it has noted what the file is like now
        path.write_text("broken")
        for _ in range(5):
            await asyncio.sleep(0)
        assert certificate_of(context) == first
        shutil.copy(SECOND, path)
        os.utime(path, (1, 1))
        await eventually(lambda: certificate_of(context) != first)
        watching.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"ssl_keyfile": FIRST}, "--ssl-keyfile needs --ssl-certfile"),
        ({"enable_ssl_refresh": True}, "--enable-ssl-refresh needs --ssl-certfile"),
        ({"ssl_certfile": "/nowhere.pem"}, "--ssl-certfile /nowhere.pem: No such file"),
        ({"ssl_certfile": FIRST, "ssl_keyfile": SECOND}, "does not belong to the certificate"),
        ({"ssl_certfile": __file__}, "a PEM file is expected"),
        ({"ssl_certfile": FIRST, "ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"ssl_certfile": FIRST, "ssl_ca_certs": "/nowhere.pem"}, "--ssl-ca-certs /nowhere.pem"),
        ({"ssl_certfile": FIRST, "ssl_ciphers": "none such"}, "--ssl-ciphers"),
    ],
)
def test_settings_with_which_no_handshake_can_succeed(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_tls(ServerConfig(**settings))


def test_such_settings_are_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> Any:
        raise AssertionError("the model was loaded")

    assert run_server(never, ServerConfig(port=0, ssl_certfile="/nowhere.pem")) == 1
    assert "/nowhere.pem" in capsys.readouterr().err


def test_it_listens_on_a_socket_file(short_path: Path) -> None:
    path = str(short_path / "octavo.sock")
    config = ServerConfig(uds=path, log_stats_interval_s=0)

    async def scenario() -> None:
        async with running(config) as (line, _):
            assert f"ready at {path}" in line
            assert "browser" not in line  # none opens a socket file
            assert f"curl --unix-socket {path} http://localhost{CHAT}" in line
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), timeout=120) as client:
                assert (await client.post(f"http://localhost{CHAT}", json=HELLO)).status_code == 200
            with pytest.raises(ConfigError, match="A server already listens on"):
                bind(config)

    asyncio.run(scenario())
    bind(config).close()  # what the first left behind is no obstacle
    release(config)
    assert not os.path.exists(path)
    Path(path).write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind(config)
    assert Path(path).read_text() == "precious"


def test_no_more_requests_at_once_than_allowed() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        house = make_house(saying("x"), ServerConfig(max_concurrent_requests=1), pace=gate.wait)  # type: ignore[arg-type]
        first = Visitor(house.app, CHAT, HELLO)
        await eventually(lambda: bool(house.engine.requests))
        second = await ask(house.app, CHAT, HELLO)
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        assert "max-concurrent-requests" in second.error()["message"]
        assert (await ask(house.app, "/health", method="GET")).status == 200
        gate.set()
        assert (await first.whole()).status == 200
        assert (await ask(house.app, CHAT, HELLO)).status == 200

    asyncio.run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), ServerConfig(body_timeout_s=0))
        visitor = Visitor(house.app, CHAT, parts=[])  # sends nothing, and stays
        answer = await visitor.whole()
        assert answer.status == 408
        assert "--body-timeout" in answer.error()["message"]
        assert house.lifecycle.inflight == 0

    asyncio.run(scenario())


class Slow(Visitor):
    """Its second part is on its way for some turns of the event loop."""

    async def _receive(self) -> dict[str, Any]:
        if len(self._parts) == 1:
            for _ in range(10):
                await asyncio.sleep(0)
        return await super()._receive()


@pytest.mark.parametrize(("size", "status"), [(1 << 20, 200), (1, 408)])
def test_what_has_come_of_a_body_buys_time_for_the_rest(size: int, status: int) -> None:
    async def scenario() -> None:
        house = make_house(saying("x"), ServerConfig(body_timeout_s=0))
        answer = await Slow(house.app, CHAT, parts=[b" " * size, json.dumps(HELLO).encode()]).whole()
        assert answer.status == status
        assert (answer.status == 200) or "16,384 bytes" in answer.error()["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("root", ["/api", "api/"])
def test_requests_come_with_and_without_the_root_path(root: str) -> None:
    app = make_house(saying("x"), ServerConfig(root_path=root, api_keys=("k",))).app
    for path in (CHAT, "/api" + CHAT):
        assert ask_now(app, path, HELLO, headers={"x-api-key": "k"}).status == 200
        assert ask_now(app, path, HELLO).status == 401
    assert ask_now(app, "/api/health", method="GET").status == 200
    assert "/api/v1/models" in ask_now(app, "/", method="GET").json()["links"]
    assert b'fetch("./openapi.json")' in ask_now(app, "/api/docs", method="GET").body
    assert ask_now(app, "/api/openapi.json", method="GET").status == 200


@pytest.mark.parametrize("root", ["/api", "api/"])
def test_the_example_has_the_root_path(root: str) -> None:
    async def scenario() -> None:
        async with running(ServerConfig(port=0, log_stats_interval_s=0, root_path=root)) as (line, sock):
            assert f"curl http://127.0.0.1:{sock.getsockname()[1]}/api{CHAT}" in line

    asyncio.run(scenario())
