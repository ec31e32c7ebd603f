"""One contender after the other on the same GPU: its starts, its streams at several rates, its offline lines."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import arrivals
from arrivals import Traffic
from contenders import SERVED_NAME, Contender, Setup
from engines import EngineError, RunningEngine, ServerEngine, WorkerEngine
from lines import LINES, WARM_SCALE, Line
from model import vocab_size
from workloads import Request, check

_GPU_FREE_TIMEOUT_S = 60.0
_GPU_FREE_MIB = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        lines: names of offline lines; `runs`: how often each is timed.
        traffic: what arrives over HTTP; `http_runs`: how often each.
        scale: share of each line's requests.
        warm_start: start every server a second time, with its caches filled.
    """

    lines: Sequence[str]
    runs: int
    traffic: Sequence[Traffic]
    http_runs: int
    scale: float
    warm_start: bool


class Session:
    """
    Args:
        setup: how engines are started.
        plan: what is measured.
        logs: where the engines' output goes.
        save: called with a contender's name and its figures so far, whenever there are new ones.
    """

    def __init__(self, setup: Setup, plan: Plan, logs: Path, save: Callable[[str, dict[str, Any]], None]) -> None:
        self._setup = setup
        self._plan = plan
        self._logs = logs
        self._save = save
        self._cores = sorted(os.sched_getaffinity(0))
        self._vocab = vocab_size(setup.model)

    def run(self, contender: Contender, caches: Path) -> None:
        """Measure one contender. An engine that fails is reported with the end of its log; the next one still runs.

        `caches` begins empty, and is kept for contenders of the same engine.
        """
        found: dict[str, Any] = {"policy": contender.policy}
        try:
            if contender.serve is not None:
                self._serve(contender, caches, found)
            self._offline(contender, caches, found)
        except (EngineError, RuntimeError, OSError, TimeoutError) as error:
            found["failed"] = f"{type(error).__name__}: {error}"
            print(f"{contender.name}: {found['failed']}", flush=True)
        self._save(contender.name, found)

    def _serve(self, contender: Contender, caches: Path, found: dict[str, Any]) -> None:
        launch = contender.server(self._setup, caches)
        found["server_command"] = " ".join(launch.command)
        with self._server(contender, caches, found, "start_cold_s") as server:
            streams = found.setdefault("http", {})
            self._stream(server, Traffic(10, 2.0), seed=-1)
            for traffic in self._plan.traffic:
                runs = [self._stream(server, traffic, seed) for seed in range(self._plan.http_runs)]
                streams[f"{traffic.rate:g}"] = runs
                print(f"{contender.name}, {traffic.rate:g} requests/s: {runs}", flush=True)
                self._save(contender.name, found)
        if self._plan.warm_start:
            with self._server(contender, caches, found, "start_warm_s"):
                self._save(contender.name, found)

    def _stream(self, server: ServerEngine, traffic: Traffic, seed: int) -> dict[str, float]:
        timings = arrivals.run(server.address, traffic.arrivals(seed, self._vocab))
        return dict(arrivals.figures(timings))

    def _offline(self, contender: Contender, caches: Path, found: dict[str, Any]) -> None:
        launch = contender.worker(self._setup, caches)
        found["offline_command"] = " ".join(launch.command)
        began = time.perf_counter()
        with closing(WorkerEngine(launch, self._cores, self._log(contender, "offline"))) as engine:
            engine.wait()
            found["start_offline_s"] = round(time.perf_counter() - began, 2)
            found["versions"] = dict(engine.versions)
            print(f"{contender.name}: offline after {found['start_offline_s']} s", flush=True)
            for name in self._plan.lines:
                if contender.lines is None or name in contender.lines:
                    found.setdefault("lines", {})[name] = self._line(engine, LINES[name])
                    print(f"{contender.name}, {name}: {found['lines'][name]}", flush=True)
                    self._save(contender.name, found)
        wait_until_free(self._setup.device)

    def _line(self, engine: RunningEngine, line: Line) -> list[float]:
        """The figure of every run."""
        self._timed(engine, line.make(-1, self._vocab, WARM_SCALE * self._plan.scale))
        figures = []
        for seed in range(self._plan.runs):
            requests = line.make(seed, self._vocab, self._plan.scale)
            figures.append(round(line.figure(requests, self._timed(engine, requests)), 4))
        return figures

    def _timed(self, engine: RunningEngine, requests: Sequence[Request]) -> float:
        outcome = engine.run(requests)
        check(requests, outcome)
        return outcome.last

    @contextmanager
    def _server(self, contender: Contender, caches: Path, found: dict[str, Any], start: str) -> Iterator[ServerEngine]:
        """A server that answers; the seconds from exec until then go to `found[start]`."""
        began = time.perf_counter()
        launch = contender.server(self._setup, caches)
        server = ServerEngine(launch, self._cores, self._log(contender, start), model=SERVED_NAME)
        with closing(server):
            server.wait()
            found[start] = round(time.perf_counter() - began, 2)
            print(f"{contender.name}: {start} {found[start]}", flush=True)
            yield server
        wait_until_free(self._setup.device)

    def _log(self, contender: Contender, what: str) -> Path:
        return self._logs / f"{contender.name.replace(' ', '-')}-{what}.log"


def wait_until_free(device: str) -> None:
    """Return once the last engine's memory is back, so that the next one finds all of it."""
    if device != "cuda":
        return
    until = time.monotonic() + _GPU_FREE_TIMEOUT_S
    while _gpu_used_mib() > _GPU_FREE_MIB:
        if time.monotonic() > until:
            raise TimeoutError(f"the GPU still holds more than {_GPU_FREE_MIB} MiB after {_GPU_FREE_TIMEOUT_S:.0f} s")
        time.sleep(0.25)


def _gpu_used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def fresh_caches(parent: Path, engine: str) -> Path:
    """An empty folder for what an engine compiles."""
    return Path(tempfile.mkdtemp(prefix=f"{engine}-", dir=parent))


def ceilings(setup: Setup, caches: Path) -> dict[str, float]:
    """What the chip does at best, measured by a process of its own: copy bandwidth and bfloat16 products."""
    code = "import json, gpu_workloads; print(json.dumps(gpu_workloads.ceilings()))"
    done = subprocess.run(
        [setup.python, "-c", code],
        env={**os.environ, **setup.environment(caches)},
        cwd=Path(__file__).resolve().parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
