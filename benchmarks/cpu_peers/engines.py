"""The engines under test: how each is started, spoken to, kept still while another has its turn, and ended."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import http_client
import processes
from workloads import WAKE, Outcome, Request

START_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Launch:
    """A program and what it is told.

    Attributes:
        cores: the processors that it may use at all.
        extra: for a server, fields of every request that only this engine needs.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


class EngineError(Exception):
    """An engine that did not start or ended; the text has the end of its log."""


class RunningEngine(ABC):
    """An engine's processes, starting when it is made. Subclasses know how to speak to it.

    Every method raises EngineError if the engine doesn't do it; its processes have been ended then.
    """

    def __init__(self, launch: Launch, cores: Sequence[int], log: Path) -> None:
        self.versions: Mapping[str, str] = {}
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._process = self._spawn(launch, frozenset(cores))
        self.pid = self._process.pid

    @abstractmethod
    def wait(self) -> None:
        """Until it is loaded and answers."""

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> Outcome:
        """Serve requests that all arrive at once."""

    def freeze(self) -> None:
        processes.freeze(self.pid)

    def thaw(self) -> None:
        processes.thaw(self.pid)

    def close(self) -> None:
        processes.end(self._process)

    def wake(self) -> None:
        self.run(WAKE)

    def failed(self, what: str) -> EngineError:
        self.close()
        tail = self._log.read_text(encoding="utf-8", errors="replace")[-1500:] if self._log.is_file() else ""
        return EngineError(f"{what}; its log {self._log} ends:\n{tail}")

    @abstractmethod
    def _spawn(self, launch: Launch, cores: frozenset[int]) -> subprocess.Popen[bytes]: ...

    def _popen(self, launch: Launch, cores: frozenset[int], **pipes: Any) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                launch.command,
                env={**_clean_environment(), **launch.environment},
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(_prepare, cores),
                **{"stdout": log, **pipes},
            )


class WorkerEngine(RunningEngine):
    """An engine in a worker process that speaks `protocol.py`."""

    def wait(self) -> None:
        self.versions = self._answer(START_TIMEOUT_S)["version"]

    def run(self, requests: Sequence[Request]) -> Outcome:
        self._tell({"do": "run", "requests": [[request.prompt, request.output_tokens] for request in requests]})
        answer = self._answer(START_TIMEOUT_S)
        return Outcome(answer["last"], answer["tokens"], answer["first"])

    def _spawn(self, launch: Launch, cores: frozenset[int]) -> subprocess.Popen[bytes]:
        return self._popen(launch, cores, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _tell(self, order: Mapping[str, Any]) -> None:
        try:
            _pipe(self._process.stdin).write(json.dumps(order).encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise self.failed("the worker has ended") from None

    def _answer(self, timeout: float) -> dict[str, Any]:
        out = _pipe(self._process.stdout)
        if not select.select([out], [], [], timeout)[0]:
            raise self.failed(f"no answer within {timeout:.0f} s")
        line = out.readline()
        if not line:
            raise self.failed("the worker ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.failed(answer["error"])
        return answer


class ServerEngine(RunningEngine):
    """An OpenAI-compatible server. `{port}` in the command becomes its port."""

    def __init__(self, launch: Launch, cores: Sequence[int], log: Path, *, model: str) -> None:
        self.address = http_client.Address(_free_port(), model, launch.extra)
        super().__init__(launch, cores, log)

    def wait(self) -> None:
        url = f"http://{self.address.host}:{self.address.port}/health"
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise self.failed(f"the server ended with status {self._process.returncode}")
            try:
                with urllib.request.urlopen(url, timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)  # not listening yet, or still loading
        raise self.failed(f"not healthy within {START_TIMEOUT_S} s")

    def run(self, requests: Sequence[Request]) -> Outcome:
        try:
            return http_client.run(self.address, requests)
        except (OSError, RuntimeError) as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def _spawn(self, launch: Launch, cores: frozenset[int]) -> subprocess.Popen[bytes]:
        port = str(self.address.port)
        command = tuple(part.replace("{port}", port) for part in launch.command)
        return self._popen(Launch(command, launch.environment), cores, stdin=subprocess.DEVNULL)


def _prepare(cores: frozenset[int]) -> None:
    processes.die_with_parent()
    os.sched_setaffinity(0, cores)


def _clean_environment() -> dict[str, str]:
    """This process's, without what would change how many threads an engine starts, or which code it finds."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "KMP_", "GOMP_", "MKL_", "PYTHON"))}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
