"""Prefill servers: which is asked, and what happens if one does not answer."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.features.kv_transfer.asking import Asked, AskedError, PrefillServers, offer_of

OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "127.0.0.1",
    "remote_port": 7,
    "remote_ranks": [["", 7], ["127.0.0.1", 8]],
    "blocks": [[[0, 3]]],
    "last_block": "ab",
}


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *args: Any) -> None:
        """Write nothing: some tests close the connection."""


class Server:
    """A prefill server.

    Attributes:
        answer: called with a body; returns status and answer.
        asked: bodies so far, with their headers.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> None:
        self.answer = answer
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((body, {name.lower(): value for name, value in self.headers.items()}))
                status, found = outer.answer(body)
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Write nothing."""

        self._http = Quiet(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


Made = Callable[..., Server]


@pytest.fixture
def server() -> Iterator[Made]:
    made: list[Server] = []

    def make(answer: Callable[[dict[str, Any]], tuple[int, Any]] | None = None) -> Server:
        made.append(Server(answer or (lambda body: (200, {"kv_transfer_params": OFFER}))))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ended(asked: Asked) -> Asked:
    asked.ended.result(60)
    return asked


def test_the_prompt_is_asked_for_and_its_offer_returned(server: Made) -> None:
    one = server()
    servers = PrefillServers([one.url + "/"], "secret", 30.0)
    asked = ended(servers.ask([1, 2, 3], "salt", 5))
    assert asked.server == one.url
    assert asked.offer is not None
    assert asked.offer.remote_ranks == [("127.0.0.1", 7), ("127.0.0.1", 8)], "an empty host is the server's"
    assert asked.offer.blocks == [[(0, 3)]]
    ((body, headers),) = one.asked
    assert body == {
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": 0,
        "cache_salt": "salt",
        "priority": 5,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    assert headers["authorization"] == "Bearer secret"
    assert (servers.num_asked, servers.num_failed) == (1, 0)


def test_what_is_not_set_is_not_sent(server: Made) -> None:
    one = server()
    ended(PrefillServers([one.url], None, 30.0).ask([1], "", 0))
    ((body, headers),) = one.asked
    assert not {"cache_salt", "priority"} & body.keys()
    assert "authorization" not in headers


def test_a_prompt_of_which_nothing_is_kept_is_no_failure(server: Made) -> None:
    one = server(lambda body: (200, {"kv_transfer_params": {"do_remote_prefill": False}}))
    servers = PrefillServers([one.url], None, 30.0)
    assert ended(servers.ask([1], "", 0)).offer is None
    assert servers.num_failed == 0


def test_the_server_with_the_fewest_tokens_is_asked(server: Made) -> None:
    go: Future[None] = Future()

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        go.result(60)
        return 200, {"kv_transfer_params": OFFER}

    first, second = server(slow), server(slow)
    servers = PrefillServers([first.url, second.url], None, 60.0)
    asked = [servers.ask([0] * count, "", 0) for count in (100, 10, 10, 10)]
    go.set_result(None)
    assert {ended(one).server for one in asked} == {first.url, second.url}
    counts = sorted(sum(len(body["prompt"]) for body, _ in one.asked) for one in (first, second))
    assert counts == [30, 100]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((503, {"error": "draining"}), "status 503"),
        ((401, {"error": "key"}), "status 401"),
        ((200, {"choices": []}), "has no kv_transfer_params; start it with --kv-transfer-config"),
        ((200, {"kv_transfer_params": {"do_remote_prefill": True}}), "not that of an Octavo server"),
    ],
)
def test_another_server_is_asked_instead_and_this_one_not_for_a_while(
    answer: tuple[int, Any], text: str, server: Made, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = server(lambda body: answer), server()
    now = [0.0]
    servers = PrefillServers([bad.url, good.url], None, 30.0, clock=lambda: now[0])
    for _ in range(3):
        assert ended(servers.ask([1], "", 0)).server == good.url
    assert len(bad.asked) == 1
    now[0] = 6.0
    ended(servers.ask([1], "", 0))
    assert len(bad.asked) == 2
    with caplog.at_level(logging.WARNING):
        good.answer = lambda body: answer
        now[0] = 12.0
        assert ended(servers.ask([1], "", 0)).offer is None
    assert text in caplog.text
    assert servers.num_failed == 1


def test_a_server_whose_blocks_are_of_no_use_is_not_asked_for_a_minute(server: Made) -> None:
    first, second = server(), server()
    now = [0.0]
    servers = PrefillServers([first.url, second.url], None, 100.0, clock=lambda: now[0])
    asked = ended(servers.ask([1], "", 0))
    servers.refuse(asked)
    now[0] = 59.0
    other = ended(servers.ask([1], "", 0))
    assert {asked.server, other.server} == {first.url, second.url}
    servers.refuse(other)
    assert ended(servers.ask([1], "", 0)).offer is None
    now[0] = 61.0
    assert ended(servers.ask([1], "", 0)).server == asked.server


def test_few_prompts_wait_for_a_server_that_stands_still(server: Made) -> None:
    """After a failure it gets one prompt at a time, and longer pauses, until it answers."""
    now, go = [0.0], [Future[None]()]
    bad = [True]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        go[0].result(60)
        return (503, {}) if bad[0] else (200, {"kv_transfer_params": OFFER})

    one = server(answer)
    servers = PrefillServers([one.url], None, 1000.0, clock=lambda: now[0])
    first = [servers.ask([1], "", 0) for _ in range(3)]
    go[0].set_result(None)
    assert [ended(asked).offer for asked in first] == [None] * 3
    many = len(one.asked)
    for pause in (5, 10, 20, 40, 60, 60):
        now[0] += pause - 0.5
        assert ended(servers.ask([1], "", 0)).server == ""
        now[0] += 1
        go[0] = Future()
        probe = servers.ask([1], "", 0)
        while not probe.server:
            """Its thread takes it."""
        assert ended(servers.ask([1], "", 0)).server == "", "while another one is with it"
        go[0].set_result(None)
        assert ended(probe).offer is None
        many += 1
        assert len(one.asked) == many
        now[0] -= 0.5
    now[0], bad[0] = now[0] + 61, False
    assert ended(servers.ask([1], "", 0)).offer is not None
    go[0] = Future()
    both = [servers.ask([1], "", 0) for _ in range(2)]
    while not all(asked.server for asked in both):
        """Their threads take them."""
    go[0].set_result(None)
    assert all(ended(asked).offer is not None for asked in both)


def test_one_bad_prompt_does_not_keep_others_away(server: Made) -> None:
    one = server(
        lambda body: (400, {"error": "too long"}) if len(body["prompt"]) > 2 else (200, {"kv_transfer_params": OFFER})
    )
    servers = PrefillServers([one.url], None, 30.0)
    assert ended(servers.ask([1, 2, 3], "", 0)).offer is None
    assert ended(servers.ask([1, 2], "", 0)).offer is not None


def test_a_server_that_is_not_there(server: Made, caplog: pytest.LogCaptureFixture) -> None:
    gone = server()
    gone.close()
    servers = PrefillServers([gone.url], None, 30.0)
    assert ended(servers.ask([1], "", 0)).offer is None
    assert ended(servers.ask([1], "", 0)).offer is None
    assert servers.num_failed == 2
    assert "so it is computed here" in caplog.text
    assert caplog.text.count("so it is computed here") == 1, "said once, not for each prompt of the next seconds"


def test_blocks_that_only_the_server_itself_reaches() -> None:
    answer = json.dumps({"kv_transfer_params": OFFER}).encode()
    assert offer_of(answer, "localhost") is not None
    with pytest.raises(AskedError, match=r"from 127\.0\.0\.1, which only its own machine reaches; set kv_ip"):
        offer_of(answer, "10.0.0.5")


def test_a_prompt_that_nobody_waits_for_ends_at_the_server(server: Made) -> None:
    begun: Future[None] = Future()
    go: Future[None] = Future()

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        begun.set_result(None)
        go.result(60)
        return 200, {"kv_transfer_params": OFFER}

    one = server(slow)
    servers = PrefillServers([one.url], None, 600.0)
    asked = servers.ask([1], "", 0)
    begun.result(60)
    asked.give_up()
    assert ended(asked).offer is None, "although the server has not answered"
    assert servers.num_failed == 0
    go.set_result(None)


def test_a_prompt_that_is_given_up_before_its_turn_is_not_asked_for(server: Made) -> None:
    one = server()
    servers = PrefillServers([one.url], None, 600.0)
    hold: Future[None] = Future()
    for _ in range(64):
        servers._threads.submit(hold.result)
    asked = servers.ask([1], "", 0)
    asked.give_up()
    hold.set_result(None)
    ended(asked)
    assert one.asked == []
