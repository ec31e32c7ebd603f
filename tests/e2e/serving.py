"""A real `octavo serve` process, started, watched and ended by tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

START_S = 240
WAIT_S = 120
"""For what takes a moment here: a machine may be several times slower, or stand still for a while."""
POLL_S = 0.05

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo.cli.main", "serve", *arguments]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = WAIT_S) -> None:
    """Ask again and again until `condition` holds; fails, naming `what`, once the deadline has passed.

    Counted in looks, so that time in which the whole machine stood still does not count.
    """
    for _ in range(round(deadline_s / POLL_S)):
        if condition():
            return
        time.sleep(POLL_S)
    raise AssertionError(f"{what}: not within {deadline_s} s")


def together(ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Ask for all items at once, so that they share the steps of the engine; the answers in the items' order."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(ask, items))


def children(pid: int) -> list[int]:
    """Processes that one has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a process that has just ended
            found += map(int, task.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Those, and what they have started in their turn."""
    found = children(pid)
    return [*found, *(below for child in found for below in descendants(child))]


class Server:
    """One server process with its engine core. Its output goes to `log`, which failures show.

    `command` starts another server than `octavo serve MODEL`.
    """

    def __init__(self, model: str, log: Path, *arguments: str, command: Sequence[str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(command or serve_command(model)),
                    *("--port", str(self.port), "--served-model-name", "smollm2", *arguments),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"OCTAVO_DATA": str(log.parent / "data"), **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.output()}"
            try:
                return self.http.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(ready, "the server's start", START_S)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.output()}") from None

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def metric(self, name: str, **labels: str) -> float:
        """One sample of a scrape."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        values = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(values) == 1, f"{name} {labels}: {values}"
        return values[0]

    def wait_idle(self) -> None:
        """Wait until nothing runs, nothing waits, and every KV block is free."""
        names = ("octavo:num_requests_running", "octavo:num_requests_waiting", "octavo:kv_blocks_used")
        wait_until(lambda: all(self.metric(name) == 0 for name in names), f"{names} all 0")

    def children(self) -> list[int]:
        """Processes that the server has started."""
        return children(self.process.pid)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """End the process whatever state it is in."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
