"""A device that is lost under load: everybody is told, once, and the server ends and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import toy_models
from serving import POLL_S, START_S, WAIT_S, Server, descendants, together, wait_until

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
REQUESTS = 32
DIVIDED = ("--tensor-parallel-size", "2")
REQUESTS_DIVIDED = ("--data-parallel-size", "2", "--enable-expert-parallel")
EXPERTS = toy_models.LLAMA | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 440}
EXPERTS |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 8192}
EXPERTS |= {"shared_expert_intermediate_size": 48}
KILLED, STOPPED = "its process was killed by SIGKILL", "its process was stopped by a signal (SIGSTOP)"
SAID = "The device was lost: toy device: it was told to break."
WILD = """
import triton
import triton.language as tl
from octavo.features.logits_processors import LogitsProcessor


@triton.jit
def write_wildly(logits, far):
    tl.store(logits + far, 1.0)


class Wild(LogitsProcessor):
    def apply(self, logits, rows):
        if any(len(row.output_ids) == 60 for row in rows):
            write_wildly[(1,)](logits, 1 << 44)
        return logits
"""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def errors_of(server: Server, number: int, max_tokens: int) -> list[tuple[int, str]]:
    """The errors, code and text, that one request gets: every other one is a stream."""
    body = {"prompt": f"{number} times", "max_tokens": max_tokens, "ignore_eos": True, "stream": number % 2 == 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    if response.status_code != 200:  # streams that had not begun are among them
        error = response.json()["error"]
        return [(response.status_code, error["message"])]
    said = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert said[-1] == "[DONE]"
    found = [json.loads(one)["error"] for one in said[:-1] if "error" in json.loads(one)]
    return [(error["code"], error["message"]) for error in found]


def last_health(server: Server) -> str:
    """Ask for the server's health until it is bad; what it says then."""
    while True:
        response = httpx.get(f"{server.url}/health", timeout=WAIT_S)
        if response.status_code != 200:
            assert response.status_code == 503
            return response.text
        time.sleep(POLL_S)


def no_blow() -> None:
    """The device is lost by itself."""


def check_end(
    server: Server,
    said: str,
    folder: Path,
    max_tokens: int,
    *,
    blow: Callable[[], None] = no_blow,
    requests: Iterable[int] = range(REQUESTS),
) -> None:
    """Put the server under a load under which its device is lost, and check what becomes of requests and processes.

    Args:
        said: part of every error.
        folder: where the server's sockets are.
        max_tokens: more than it has time for.
        blow: brings the device's end about; called while requests run.
        requests: numbers of the requests; the even ones are streams.
    """
    family = descendants(server.process.pid)
    with ThreadPoolExecutor(2) as pool:
        health = pool.submit(last_health, server)
        struck = pool.submit(blow)
        asked = together(lambda number: errors_of(server, number, max_tokens), requests)
        struck.result()
        assert said in health.result()
    assert all(len(errors) == 1 for errors in asked), asked
    assert [error for (error,) in asked if error[0] != 503 or said not in error[1]] == [], server.output()
    assert server.process.wait(START_S) == 1, server.output()
    assert f"octavo: error: {said}" in server.output()
    wait_until(lambda: all(map(ended, family)), "the end of all processes")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="one process", marks=pytest.mark.slow),
        pytest.param(("--api-server-count", "2"), id="two processes"),
    ],
)
def test_everybody_is_told_and_the_server_ends(
    flags: tuple[str, ...], tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(short_path))
    command = [sys.executable, str(HERE / "stub_server.py"), f"toy:{REQUESTS}"]
    server = Server("", tmp_path / "log", *flags, command=command)
    try:
        server.wait_ready()
        check_end(server, SAID, short_path, 900)
        assert "the core ends with 70" in server.output()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("flags", "number", "blow", "how"),
    [
        (DIVIDED, 1, signal.SIGKILL, KILLED),
        pytest.param(REQUESTS_DIVIDED, 1, signal.SIGKILL, KILLED, marks=pytest.mark.slow),
        pytest.param(DIVIDED, 0, signal.SIGKILL, KILLED, marks=pytest.mark.slow),
        pytest.param(("--pipeline-parallel-size", "2"), 0, signal.SIGKILL, KILLED, marks=pytest.mark.slow),
        pytest.param(("--pipeline-parallel-size", "2"), 1, signal.SIGSTOP, STOPPED, marks=pytest.mark.slow),
        pytest.param(DIVIDED, 1, signal.SIGSTOP, STOPPED, marks=pytest.mark.slow),
        pytest.param(("--distributed-executor-backend", "mp"), 0, signal.SIGKILL, KILLED, marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_a_lost_device(
    flags: tuple[str, ...],
    number: int,
    blow: signal.Signals,
    how: str,
    tmp_path: Path,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lose_rank(flags, number, blow, how, tmp_path, short_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("time", range(20))
@pytest.mark.parametrize(("blow", "how"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)], ids=["kill", "stop"])
def test_nothing_is_left_of_64_streams(
    blow: signal.Signals, how: str, time: int, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is lost at another moment each time: after more tokens, or while many streams have none."""
    streams = range(0, 2 * 64, 2)
    place = (tmp_path, short_path, monkeypatch)
    lose_rank(DIVIDED, time % 2, blow, how, *place, requests=streams, seats=(8, 64)[time % 3 > 0], tokens=60 * time)


def lose_rank(
    flags: tuple[str, ...],
    number: int,
    blow: signal.Signals,
    how: str,
    tmp_path: Path,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    requests: Sequence[int] = range(REQUESTS),
    seats: int = 8,
    tokens: int = 0,
) -> None:
    """Lose a rank of a server under load. No process, socket or shared memory is left.

    Args:
        number: of the rank.
        seats: requests that run at once.
        tokens: generated before the blow.
    """
    model = toy_models.save_decoder(tmp_path / "model", seed=1, max_position_embeddings=8192)
    if flags == REQUESTS_DIVIDED:
        (model / "config.json").write_text(json.dumps(EXPERTS))
        flags = (*flags, "--load-format", "dummy")
    monkeypatch.setenv("TMPDIR", str(short_path))
    limits = ("--max-num-seqs", str(seats), "--kv-cache-memory-bytes", "512M", "--threads", "1", "--device", "cpu")
    shared = set(Path("/dev/shm").iterdir())
    server = Server(str(model), tmp_path / "log", *flags, *limits)

    def strike() -> None:
        crowd = len(requests) - seats
        wait_until(lambda: server.metric("octavo:num_requests_waiting") == crowd, "a crowd")
        wait_until(lambda: server.metric("octavo:num_requests_running") == seats, "a crowd")
        wait_until(lambda: server.metric("octavo:generation_tokens_total") >= tokens, "tokens")
        ranks = [pid for pid in descendants(server.process.pid) if "octavo.rank_main" in command_of(pid)]
        os.kill(sorted(ranks)[number], blow)

    try:
        server.wait_ready()
        check_end(server, f"The device was lost: rank {number} (", short_path, 8000, blow=strike, requests=requests)
        assert f": {how}" in server.output()
        assert set(Path("/dev/shm").iterdir()) <= shared
    finally:
        server.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("flags", [(), ("--enforce-eager",)], ids=["graphs", "eager"])
def test_an_illegal_access_on_a_gpu_is_the_end(
    flags: tuple[str, ...], tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logits processor's kernel writes where no memory is. Its error shows in whatever is waited for next."""
    model = toy_models.save_decoder(tmp_path / "model", seed=1)
    (tmp_path / "wild.py").write_text(WILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("TMPDIR", str(short_path))
    limits = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "64M", "--max-model-len", "128")
    arguments = ("--device", "cuda", "--logits-processors", "wild:Wild", *limits, *flags)
    server = Server(str(model), tmp_path / "log", *arguments)
    try:
        server.wait_ready()
        check_end(server, "The device was lost: NVIDIA", short_path, 110)
        assert "illegal memory access" in server.output()
        assert "terminate called" not in server.output()
    finally:
        server.close()
