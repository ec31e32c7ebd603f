"""A server of several API processes, over an engine core that only pretends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from serving import WAIT_S, Server, wait_until

pytestmark = pytest.mark.e2e

STUB = Path(__file__).with_name("stub_server.py")
# The other processes find the stub's front end by its module's name.
PYTHONPATH = os.pathsep.join([str(STUB.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
STEP_S = 0.05
ENDLESS = {"prompt": "Go on", "max_tokens": 90_000, "stream": True}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def server(*flags: str) -> Server:
        command = ["/usr/bin/env", f"PYTHONPATH={PYTHONPATH}", sys.executable, str(STUB), str(STEP_S)]
        one = Server("", tmp_path / f"log-{len(started)}", "--api-server-count", "2", *flags, command=command)
        one.http.close()  # its connections would be kept, and break with the process at their other end
        one.http = httpx.Client(base_url=one.url, timeout=WAIT_S, limits=httpx.Limits(max_keepalive_connections=0))
        started.append(one)
        return one

    try:
        yield server
    finally:
        for one in started:
            one.close()


def api_processes(server: Server) -> list[int]:
    """Those beside the first one, by their ids."""
    found = []
    for pid in server.children():
        with contextlib.suppress(OSError):
            if "octavo.server.siblings.main" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def wait_all_ready(server: Server) -> None:
    server.wait_ready()
    wait_until(lambda: "The server is ready" in server.output(), "all processes")


def served_by(server: Server, pid: int) -> int:
    """Connections that a process holds, of those that are opened here."""
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=WAIT_S))
            assert client.get("/health").status_code == 200
        local = f":{server.port:04X}"
        established = "01"
        inodes = {
            fields[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if (fields := line.split())[1].endswith(local) and fields[3] == established
        }
        links = []
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a file that was just closed
                links.append(os.readlink(link))
        return sum(link.removeprefix("socket:[").rstrip("]") in inodes for link in links)


def goes_on(lines: Iterator[str], steps: float) -> bool:
    """Whether a stream brings more events than there were steps, or breaks off before."""
    events = 0
    with contextlib.suppress(httpx.TransportError):
        while events <= steps:
            events += next(lines).startswith("data: ")
    return events > steps


def test_one_that_dies_takes_only_its_own_streams_along_and_is_started_again(start: Callable[..., Server]) -> None:
    server = start("--shutdown-timeout", str(WAIT_S))
    wait_all_ready(server)
    (victim,) = api_processes(server)
    with contextlib.ExitStack() as stack:
        streams = []
        for _ in range(16):  # each on a connection of its own
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=WAIT_S))
            streams.append(stack.enter_context(client.stream("POST", "/v1/completions", json=ENDLESS)).iter_lines())
        wait_until(lambda: server.metric("octavo:num_requests_running") == 16, "all streams")
        assert server.http.get("/load").json() == {"server_load": 16}
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: server.metric("octavo:api_process_restarts_total") == 1, "a restart")
        wait_until(lambda: server.metric("octavo:num_requests_running") < 16, "the end of its requests")
        steps = server.metric("octavo:engine_steps_total")
        lost = sum(not goes_on(stream, steps) for stream in streams)
        assert 0 < lost < 16
        assert server.metric("octavo:num_requests_running") == 16 - lost
        assert server.http.get("/load").json() == {"server_load": 16 - lost}
    wait_until(lambda: server.metric("octavo:num_requests_running") == 0, "the end of all")
    assert len(api_processes(server)) == 1
    assert "was killed by SIGKILL" in server.output()

    short = ENDLESS | {"max_tokens": 40}
    with contextlib.ExitStack() as stack:
        said = []
        for _ in range(12):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=WAIT_S))
            response = stack.enter_context(client.stream("POST", "/v1/completions", json=short))
            lines = response.iter_lines()
            said.append((next(lines), lines))
        server.process.send_signal(signal.SIGTERM)
        for first, lines in said:
            assert first.startswith("data: ")
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(WAIT_S) == 0, server.output()
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_one_that_dies_while_it_starts_is_started_again(start: Callable[..., Server]) -> None:
    server = start("--api-server-count", "3")
    wait_until(lambda: len(api_processes(server)) == 2, "the other processes")
    os.kill(api_processes(server)[0], signal.SIGKILL)
    wait_all_ready(server)
    assert server.metric("octavo:api_process_restarts_total") == 1
    for _ in range(16):
        assert server.http.get("/health").status_code == 200
    assert server.stop() == 0, server.output()
    assert "Traceback" not in server.output()


@pytest.mark.slow
def test_connections_of_one_that_has_died_are_answered_before_it_is_back(start: Callable[..., Server]) -> None:
    server = start()
    wait_all_ready(server)
    (victim,) = api_processes(server)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: api_processes(server) not in ([], [victim]), "a restart")
    (successor,) = api_processes(server)
    os.kill(successor, signal.SIGSTOP)  # it stays where it is in its start
    for _ in range(32):
        assert server.http.get("/health", timeout=20).status_code == 200
    os.kill(successor, signal.SIGCONT)
    wait_until(lambda: served_by(server, successor) > 0, "requests to the new process")
    assert server.stop() == 0, server.output()
    assert "Traceback" not in server.output()


def test_one_that_hangs_is_ended_and_started_again(start: Callable[..., Server]) -> None:
    server = start("--stall-after", "1")
    wait_all_ready(server)
    (victim,) = api_processes(server)
    os.kill(victim, signal.SIGSTOP)
    wait_until(lambda: "API process 1 has answered nothing for 1 s." in server.output(), "what is wrong")
    wait_until(lambda: bool(api_processes(server)) and victim not in api_processes(server), "a restart")
    wait_until(lambda: "it is restarted" in server.output(), "the reason of the restart")
    for _ in range(16):  # of both
        assert server.http.get("/health").status_code == 200
    assert server.stop() == 0, server.output()


@pytest.mark.slow
def test_one_that_dies_again_and_again_ends_the_server(start: Callable[..., Server]) -> None:
    server = start()
    wait_all_ready(server)
    for _ in range(3):
        wait_until(lambda: bool(api_processes(server)), "a restart")
        (victim,) = api_processes(server)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda victim=victim: victim not in api_processes(server), "its death")  # type: ignore[misc]
    assert server.process.wait(WAIT_S) == 1
    assert "octavo: error: API process 1 was killed by SIGKILL, 3 times" in server.output()


def test_they_share_a_socket_file_and_stop_with_one_signal(start: Callable[..., Server], short_path: Path) -> None:
    path = short_path / "socket"
    server = start("--uds", str(path))
    wait_until(lambda: "The server is ready" in server.output(), "the start")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=WAIT_S) as client:
        made = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 4}).json()
        assert made["status"] == "incomplete"
    for _ in range(6):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=WAIT_S) as client:
            assert client.get(f"/v1/responses/{made['id']}").json() == made
    assert server.stop() == 0, server.output()
    assert not path.exists()
