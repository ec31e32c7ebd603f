"""The server as a process: how it starts, stops, and fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import START_S, WAIT_S, Server, descendants, free_port, serve_command, wait_until

pytestmark = pytest.mark.e2e

BODY = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True, "stream": True}


def events(lines: list[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


def gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # also one that ends between the opening and the reading
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_it_says_when_it_is_ready(server: Server) -> None:
    ready = [line for line in server.output().splitlines() if "ready" in line]
    assert any(server.url in line for line in ready)
    assert f"curl {server.url}/v1/chat/completions" in server.output()


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = subprocess.run(serve_command("--port", str(port)), capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert str(port) in line
    assert "--port" in line
    assert result.stdout == ""


def test_a_model_that_is_not_there_is_told() -> None:
    command = serve_command("/no/such/model", "--port", str(free_port()))
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_stop_signal_lets_streams_finish(start_server: Callable[..., Server]) -> None:
    server = start_server("--shutdown-timeout", "240")
    children = server.children()
    assert children
    with server.http.stream("POST", "/v1/completions", json=BODY) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        said = events([first, *lines])
    assert said[-1] == "[DONE]"
    assert json.loads(said[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(WAIT_S) == 0, server.output()
    wait_until(lambda: all(map(gone, children)), "the end of the engine's process")
    assert "Traceback" not in server.output()


def test_a_dead_engine_is_told_to_all(start_server: Callable[..., Server]) -> None:
    server = start_server()
    (core,) = server.children()
    with server.http.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 1500}) as response:
        lines = response.iter_lines()
        first = next(lines)
        os.kill(core, signal.SIGKILL)
        said = events([first, *lines])
    assert said[-1] == "[DONE]"
    error = json.loads(said[-2])["error"]
    assert error["code"] == 503
    assert "SIGKILL" in error["message"]
    assert server.process.wait(WAIT_S) == 1, server.output()
    assert "octavo: error: The engine core was killed by SIGKILL." in server.output()
    assert "Traceback" not in server.output()


def test_a_start_that_is_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    """As by Ctrl-C, which reaches the whole group, while compilers run: the kernels' cache is empty."""
    command = serve_command("smollm2", "--port", str(free_port()))
    env = {**os.environ, "OCTAVO_KERNEL_CACHE": str(tmp_path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True) as process:
        wait_until(lambda: any(tmp_path.rglob("*.cpp")), "what the compilers shall read")
        wait_until(lambda: len(descendants(process.pid)) > 1, "the compilers' start")
        started = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        output = "".join(process.communicate(timeout=WAIT_S))
    assert process.returncode == 128 + signal.SIGINT, output
    assert "octavo: stopped before the server was ready." in output
    assert "Traceback" not in output
    assert len(started) > 1
    wait_until(lambda: all(map(gone, started)), "the end of all that was started")
