"""What URLs of images may name."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.features.media.fetch import Fetcher


def fetcher(*domains: str, local: str = "", timeout_s: float = 20.0, most: int = 1000) -> Fetcher:
    return Fetcher(domains, local, timeout_s, most)


def refusal(one: Fetcher, url: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        one.fetch(url, "url")
    assert caught.value.param == "url"
    return caught.value.message


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            port = self.server.server_port  # type: ignore[attr-defined]
            places = {
                "/once": "/ok",
                "/round": "/round",
                "/away": f"http://localhost:{port}/ok",
                "/file": "file:///etc",
            }
            if place := places.get(self.path):
                self.send_response(302)
                self.send_header("Location", place)
                self.end_headers()
                return
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()
            if self.path == "/slow":
                self.server.slow.wait()  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(b"x" * (5000 if self.path == "/large" else 3))

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.slow = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.slow.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_data() -> None:
    assert fetcher().fetch("data:image/png;base64,YWJj", "url") == b"abc"
    assert fetcher().fetch("data:image/png;base64,YW\nJj", "url") == b"abc"
    assert fetcher().fetch("data:,a%20b", "url") == b"a b"
    assert "not valid base64" in refusal(fetcher(), "data:;base64,YWJ")
    assert "without a comma" in refusal(fetcher(), "data:image/png")
    assert "larger than 2 bytes (--max-image-bytes)" in refusal(fetcher(most=2), "data:;base64,YWJj")


@pytest.mark.parametrize("url", ["", None, 5, "image.png", "ftp://host/a", "http://[::1", "//host/a"])
def test_other_things_are_refused(url: Any) -> None:
    assert "url" in refusal(fetcher(), url)


def test_hosts_that_the_settings_name(host: str) -> None:
    named = fetcher("127.0.0.1")
    assert named.fetch(f"{host}/ok", "url") == b"xxx"
    assert named.fetch(f"{host}/once", "url") == b"xxx"
    assert "redirects more than 3 times" in refusal(named, f"{host}/round")
    assert "and not from localhost" in refusal(named, f"{host}/away")
    assert "another kind of URL" in refusal(named, f"{host}/file")
    assert "answered 500" in refusal(named, f"{host}/broken")
    assert "larger than 1,000 bytes" in refusal(named, f"{host}/large")
    assert "longer than 0.3 s (--image-fetch-timeout)" in refusal(fetcher("127.0.0.1", timeout_s=0.3), f"{host}/slow")


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:10.0.0.1]"]
)
def test_private_addresses_are_not_connected_to(name: str, host: str) -> None:
    assert "not public" in refusal(fetcher(), f"http://{name}:{host.rpartition(':')[2]}/ok")


def test_a_name_is_looked_up_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could stand for another address when it is connected to."""
    port = int(host.rpartition(":")[2])
    asked = []

    def looked_up(name: str, *args: Any, **more: Any) -> list[Any]:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if name == "127.0.0.1" else "8.8.8.8", port))]

    connected = []
    real = socket.create_connection

    def connecting(address: tuple[str, int], **more: Any) -> socket.socket:
        connected.append(address)
        return real(("127.0.0.1", address[1]), **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(socket, "create_connection", connecting)
    assert fetcher().fetch(f"http://images.example:{port}/ok", "url") == b"xxx"
    assert connected == [("8.8.8.8", port)]
    assert asked[0] == "images.example"


def test_another_address_if_the_first_does_not_answer(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(host.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("8.8.8.8", "127.0.0.1")]
    real = socket.create_connection

    def connecting(address: tuple[str, int], **more: Any) -> socket.socket:
        if address[0] == "8.8.8.8":
            raise OSError("unreachable")
        return real(address, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    monkeypatch.setattr(socket, "create_connection", connecting)
    assert fetcher("images.example").fetch(f"http://images.example:{port}/ok", "url") == b"xxx"


def test_files_only_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"abc")
    (tmp_path / "secret").write_bytes(b"s")
    (folder / "link").symlink_to(tmp_path / "secret")
    own = fetcher(local=str(folder.resolve()))
    assert own.fetch(f"file://{folder}/a%20b.png", "url") == b"abc"
    for path in (
        f"{folder}/link",
        f"{folder}/../secret",
        "/etc/passwd",
        f"{folder}/none",
        str(folder),
        f"{folder}/a%00",
    ):
        assert "must name a file in the folder" in refusal(own, f"file://{path}")
    assert "--allowed-local-media-path" in refusal(fetcher(), f"file://{folder}/a%20b.png")
