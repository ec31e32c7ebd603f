"""One group of engines: each alone for its start and its memory, then all of them in turns."""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import limits
import report
from engines import EngineError, RunningEngine
from floors import Machine, Shape, floor
from models import tensor_bytes
from processes import CpuClock, MemoryWatch
from variants import HERE, KVSize, Setup, Variant
from workloads import WAKE, WARM, WORKLOADS, Request, Workload, check

_LARGE_KV_TOKENS = 65_536
_SMALL_KV_BYTES = 256 << 20
_NOISE = 0.1
"""The share of the cores that others may take during a turn before the turn is called disturbed."""


def large_kv(gguf: Path) -> KVSize:
    """Room for every workload without a request having to wait."""
    return KVSize(_LARGE_KV_TOKENS, _LARGE_KV_TOKENS * Shape.of(gguf).kv_bytes_per_token)


@dataclass(slots=True)
class _Seen:
    """What a group showed so far."""

    runs: report.Runs
    disturbed: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    starts: dict[str, list[float]] = field(default_factory=dict)
    limits: list[dict[str, float]] = field(default_factory=list)


class Comparison:
    """
    Args:
        setup: how engines are started.
        workloads: names.
        rounds: how often each engine gets its turn with each workload.
        seed: of the prompts.
        trial: ask for a sixteenth of the output, to see that everything works.
    """

    def __init__(self, setup: Setup, workloads: Sequence[str], *, rounds: int, seed: int, trial: bool = False) -> None:
        self._setup = setup
        self._workloads = [WORKLOADS[name] for name in workloads]
        self._rounds = rounds
        self._seed = seed
        self._share = 16 if trial else 1
        self._shape = Shape.of(next(iter(setup.gguf.values())))

    def group(self, variants: Sequence[Variant], *, alone: bool) -> dict[str, Any]:
        """Measure a group; everything that was seen, for JSON. Prints as it goes."""
        seen = _Seen({w.name: {v.name: [] for v in variants} for w in self._workloads})
        self._read_limits(seen)
        memory = self._each_alone(variants, seen) if alone else {}
        with self._all_started(variants, seen) as engines:
            for number in range(self._rounds):
                for workload in self._workloads:
                    names = list(engines)
                    shift = number % max(1, len(names))
                    for name in names[shift:] + names[:shift]:
                        self._turn(engines, name, workload, number, seen)
                    last = {name: values[-1] for name, values in seen.runs[workload.name].items() if values}
                    print(f"round {number + 1}, {workload.name}: {json.dumps(last)}", flush=True)
                self._read_limits(seen)
        return self._conclude(variants, seen, memory)

    def _turn(self, engines: dict[str, RunningEngine], name: str, workload: Workload, number: int, seen: _Seen) -> None:
        requests = self._requests(workload, f"{self._seed}-{number}")
        engine = engines[name]
        engine.thaw()
        try:
            engine.run(WAKE)
            clock = CpuClock(engine.pid, self._setup.cores)
            outcome = engine.run(requests)
            others = clock.others()
            check(requests, outcome)
        except (EngineError, RuntimeError) as error:
            seen.failures[f"{name}, {workload.name}"] = str(error)
            print(f"{name} failed at {workload.name}: {error}", flush=True)
            engines.pop(name).close()
            return
        engine.freeze()
        seen.runs[workload.name][name].append(round(workload.figure(requests, outcome), 3))
        if others > _NOISE:
            seen.disturbed.append(f"round {number + 1}, {workload.name}, {name}: others took {others:.0%} of the cores")
            print(seen.disturbed[-1], flush=True)

    @contextmanager
    def _all_started(self, variants: Sequence[Variant], seen: _Seen) -> Iterator[dict[str, RunningEngine]]:
        """All of them loaded, warmed up and frozen; ended at the end."""
        engines: dict[str, RunningEngine] = {}
        try:
            for variant in variants:
                try:
                    engine, seconds = _started(variant, self._setup)
                    engine.run(WARM)
                except EngineError as error:
                    seen.failures[variant.name] = str(error)
                    print(f"{variant.name} failed: {error}", flush=True)
                    continue
                engine.freeze()
                engines[variant.name] = engine
                seen.starts.setdefault(variant.name, []).append(seconds)
                seen.versions[variant.name] = engine.versions
            yield engines
        finally:
            for engine in engines.values():
                engine.close()

    def _each_alone(self, variants: Sequence[Variant], seen: _Seen) -> dict[str, dict[str, float]]:
        """Variant -> its start with nothing compiled (seconds), and its peak memory at workload A (MB)."""
        found = {}
        for variant in variants:
            try:
                found[variant.name] = self._alone(variant, seen)
            except (EngineError, RuntimeError) as error:
                seen.failures[f"{variant.name} alone"] = str(error)
            print(f"alone: {variant.name}: {json.dumps(found.get(variant.name))}", flush=True)
        return found

    def _alone(self, variant: Variant, seen: _Seen) -> dict[str, float]:
        tokens = _SMALL_KV_BYTES // self._shape.kv_bytes_per_token // 256 * 256
        setup = replace(self._setup, kv=KVSize(tokens, _SMALL_KV_BYTES))
        found = {}
        with tempfile.TemporaryDirectory() as empty:
            if environment := variant.empty_caches(Path(empty)):
                engine, found["start_cold_s"] = _started(variant, setup, environment)
                engine.close()
        engine, seconds = _started(variant, setup)
        engine.close()
        seen.starts.setdefault(variant.name, []).append(seconds)
        requests = self._requests(WORKLOADS["A"], "memory")
        with closing(variant.start(setup)) as engine, MemoryWatch(engine.pid) as watch:
            engine.wait()
            check(requests, engine.run(requests))
        return {**found, "peak_rss_mb": round(watch.peak_rss / 1e6, 1), "peak_pss_mb": round(watch.peak_pss / 1e6, 1)}

    def _requests(self, workload: Workload, seed: str) -> list[Request]:
        whole = workload.requests(seed, self._shape.vocab_size)
        return [Request(request.prompt, -(-request.output_tokens // self._share)) for request in whole]

    def _read_limits(self, seen: _Seen) -> None:
        command = [self._setup.pythons["octavo"], HERE / "limits.py", *map(str, self._setup.cores)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seen.limits.append(json.loads(done.stdout))
        print(f"limits: {done.stdout.strip()}", flush=True)

    def _conclude(
        self, variants: Sequence[Variant], seen: _Seen, memory: Mapping[str, Mapping[str, float]]
    ) -> dict[str, Any]:
        figures = report.medians(seen.runs)
        best = limits.best(seen.limits)
        floors = {w.name: {v.name: self._floor(w, v, best) for v in variants} for w in self._workloads}
        compared = report.ratios(figures)
        alone = {
            v.name: {**memory.get(v.name, {}), "start_s": round(statistics.median(seen.starts[v.name]), 2)}
            for v in variants
            if v.name in seen.starts
        }
        result = {
            "commands": {v.name: _command(v, self._setup) for v in variants},
            "versions": seen.versions,
            "limits": seen.limits,
            "runs": seen.runs,
            "medians": figures,
            "octavo_times_as_fast_as": compared,
            "floors": floors,
            "share_of_floor": report.fractions(figures, floors),
            "alone": alone,
            "disturbed": seen.disturbed,
            "failures": seen.failures,
        }
        self._print(result)
        return result

    def _floor(self, workload: Workload, variant: Variant, best: Mapping[str, float]) -> float:
        rate = best["bfloat16_gop_s" if variant.multiplies_bfloat else "int8_gop_s"] * 1e9
        machine = Machine(best["read_gb_s"] * 1e9, products=rate, attention=best["bfloat16_gop_s"] * 1e9)
        requests = self._requests(workload, "0")
        weight_bytes = tensor_bytes(self._setup.gguf[variant.format])
        return round(workload.figure(requests, floor(requests, self._shape, weight_bytes, machine)), 3)

    def _print(self, result: Mapping[str, Any]) -> None:
        columns = [w.name for w in self._workloads]
        print("\n" + report.table("medians", report.by_variant(result["medians"]), columns))
        print("\n" + report.table("share of the floor", report.by_variant(result["share_of_floor"]), columns))
        for name, row in report.by_variant(result["octavo_times_as_fast_as"]).items():
            print("\n" + report.table(f"{name}, times as fast as", report.by_variant(row), columns))
        headings = ["start_s", "start_cold_s", "peak_rss_mb", "peak_pss_mb"]
        print("\n" + report.table("alone", result["alone"], headings), flush=True)


def _started(
    variant: Variant, setup: Setup, environment: Mapping[str, str] | None = None
) -> tuple[RunningEngine, float]:
    """An engine that is ready, and the seconds from exec to its first token."""
    started = time.perf_counter()
    engine = variant.start(setup, environment)
    try:
        engine.wait()
        ready = time.perf_counter()
        first = engine.run(WAKE).first
    except BaseException:
        engine.close()
        raise
    seconds = round(ready - started + (first or 0.0), 2)
    print(f"{variant.name} started in {seconds} s", flush=True)
    return engine, seconds


def _command(variant: Variant, setup: Setup) -> str:
    launch = variant.launch(setup)
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in launch.environment.items()), shlex.join(launch.command)])
