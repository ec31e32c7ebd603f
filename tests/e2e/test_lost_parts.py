"""A replica or a machine that is lost under 64 streams, as ranks are in test_lost_device.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import toy_models
from prometheus_client.parser import text_string_to_metric_families
from serving import WAIT_S, Server, children, descendants, free_port, serve_command, together, wait_until
from test_lost_device import check_end, command_of, ended

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STREAMS = 64
MAX_TOKENS = 400
LIMITS = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", "512M", "--threads", "1", "--device", "cpu")
KILLED, STOPPED = "The engine core was killed by SIGKILL", "its process was stopped by a signal (SIGSTOP)"
ROUNDS = 5
"""Replicas lost by one server. Each of two may be started again three times in ten minutes."""


def events_of(server: Server, number: int) -> list[dict[str, Any]]:
    """Ask for a stream; return its events, which must come to an end."""
    body = {"prompt": f"{number} times", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WAIT_S)
    if response.status_code != 200:
        return [response.json()]
    *said, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in said]


def sums_of(server: Server, name: str) -> float:
    """The sum over replicas of a metric."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return sum(one.value for family in families for one in family.samples if one.name == name)


def cores_of(server: Server) -> list[int]:
    """The replicas' processes, in the order of their start."""
    return sorted(pid for pid in children(server.process.pid) if "octavo.engine_main" in command_of(pid))


def lose_replica(server: Server, blow: signal.Signals, said: str, tokens: int, *, first: bool) -> None:
    """Lose a replica under load, and wait until it is back."""
    back = server.output().count("is back")
    before = sums_of(server, "octavo:generation_tokens_total")
    victim = cores_of(server)[0 if first else -1]

    def strike() -> None:
        wait_until(lambda: sums_of(server, "octavo:generation_tokens_total") - before >= tokens, "tokens")
        os.kill(victim, blow)

    with ThreadPoolExecutor(1) as pool:
        struck = pool.submit(strike)
        answers = together(lambda number: events_of(server, number), range(STREAMS))
        struck.result()
    broken = [events for events in answers if any("error" in event for event in events)]
    for events in broken:
        *_, last = events
        assert sum("error" in event for event in events) == 1
        assert (last["error"]["code"], said in last["error"]["message"]) == (503, True), last
    for events in answers:
        assert events in broken or events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
    assert len(broken) <= STREAMS - 1, "no stream of the other replica went on"
    assert server.http.get("/health").status_code == 200
    wait_until(lambda: ended(victim), "its end")
    wait_until(lambda: server.output().count("is back") > back, "the replica's return")


@pytest.mark.parametrize("time", range(20 // ROUNDS))
@pytest.mark.parametrize(("blow", "said"), [(signal.SIGKILL, KILLED), (signal.SIGSTOP, STOPPED)], ids=["kill", "stop"])
def test_a_lost_replica_ends_its_streams_only(
    blow: signal.Signals, said: str, time: int, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy_models.save_decoder(tmp_path / "model", seed=1, max_position_embeddings=8192)
    monkeypatch.setenv("TMPDIR", str(short_path))
    shared = set(Path("/dev/shm").iterdir())
    server = Server(str(model), tmp_path / "log", "--data-parallel-size", "2", *LIMITS)
    try:
        server.wait_ready()
        for number in range(ROUNDS):
            lose_replica(server, blow, said, 1000 * ((number + time) % 5), first=number % 2 == 0)
        family = descendants(server.process.pid)
        assert server.stop() == 0
        wait_until(lambda: all(map(ended, family)), "the end of all processes")
        assert list(short_path.iterdir()) == []
        assert set(Path("/dev/shm").iterdir()) <= shared
    finally:
        server.close()


@pytest.mark.parametrize("time", range(20))
@pytest.mark.parametrize(
    ("blow", "how"),
    [(signal.SIGKILL, "its node has disconnected"), (signal.SIGSTOP, "its node gave no sign of life for 5 s")],
    ids=["kill", "stop"],
)
def test_a_lost_node_is_a_lost_device(
    blow: signal.Signals, how: str, time: int, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines, here two process trees, which divide layers or are stages."""
    model = str(toy_models.save_decoder(tmp_path / "model", seed=1, max_position_embeddings=8192))
    monkeypatch.setenv("TMPDIR", str(short_path))
    shared = set(Path("/dev/shm").iterdir())
    divided = ("--tensor-parallel-size", "--pipeline-parallel-size")[time % 2]
    flags = (divided, "2", "--nnodes", "2", "--master-port", str(free_port()), *LIMITS)
    server = Server(model, tmp_path / "log", *flags)
    other = subprocess.Popen(serve_command(model, *flags, "--node-rank", "1"))
    numbers: Sequence[int] = range(0, 2 * STREAMS, 2)

    def strike() -> None:
        wait_until(lambda: server.metric("octavo:num_requests_running") == STREAMS, "a crowd")
        wait_until(lambda: server.metric("octavo:generation_tokens_total") >= 60 * time, "tokens")
        os.kill(other.pid, blow)

    try:
        server.wait_ready()
        ranks = descendants(other.pid)
        said = "The device was lost: rank 1 on node 1 ("
        check_end(server, said, short_path, 8000, blow=strike, requests=numbers)
        assert f": {how}" in server.output()
        other.send_signal(signal.SIGCONT)
        other.wait(WAIT_S)
        wait_until(lambda: all(map(ended, ranks)), "the end of the other machine's processes")
        assert set(Path("/dev/shm").iterdir()) <= shared
    finally:
        server.close()
        other.kill()
        other.wait()
