"""Benchmark figures from timings, under the names that serving benchmarks commonly use."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.timing import Timing
from octavo.core.errors import ConfigError

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
WIDTH = 50


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, linearly interpolated; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. `series` maps a metric to one value per request (itl: one per gap), in milliseconds."""

    duration: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    series: Mapping[str, list[float]]
    good: int | None = None

    @classmethod
    def of(cls, timings: Iterable[Timing], duration: float, goals: Mapping[str, float] | None = None) -> Summary:
        """Summarize timings. `goals`: metric -> the maximum milliseconds of a good request."""
        everything = list(timings)
        done = [t for t in everything if t.ok]
        ms = 1000.0
        return cls(
            duration=duration,
            completed=len(done),
            failed=len(everything) - len(done),
            input_tokens=sum(t.prompt_tokens for t in done),
            output_tokens=sum(t.output_tokens for t in done),
            series={
                "ttft": [t.ttft * ms for t in done],
                "tpot": [t.tpot * ms for t in done if t.output_tokens > 1],
                "itl": [gap * ms for t in done for gap in t.gaps],
                "e2el": [t.latency * ms for t in done],
            },
            good=sum(_meets(t, goals) for t in done) if goals else None,
        )

    def figures(self, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
        """Return the result in the form that is saved."""
        figures: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self._rate(self.completed),
            "output_throughput": self._rate(self.output_tokens),
            "total_token_throughput": self._rate(self.input_tokens + self.output_tokens),
        }
        if self.good is not None:
            figures["request_goodput"] = self._rate(self.good)
        for metric in metrics:
            values = self.series[metric]
            figures[f"mean_{metric}_ms"] = statistics.fmean(values) if values else math.nan
            figures[f"median_{metric}_ms"] = percentile(values, 50)
            figures |= {f"p{p:g}_{metric}_ms": percentile(values, p) for p in percentiles}
        return figures

    def text(
        self, metrics: Sequence[str], percentiles: Sequence[float], *, title: str = "Serving Benchmark Result"
    ) -> str:
        """Return the result in the form that is printed."""
        figures = self.figures(metrics, percentiles)
        lines = [
            f" {title} ".center(WIDTH, "="),
            _line("Successful requests:", self.completed),
            _line("Failed requests:", self.failed),
            _line("Benchmark duration (s):", self.duration),
            _line("Total input tokens:", self.input_tokens),
            _line("Total generated tokens:", self.output_tokens),
            _line("Request throughput (req/s):", figures["request_throughput"]),
        ]
        if self.good is not None:
            lines.append(_line("Request goodput (req/s):", figures["request_goodput"]))
        lines += [
            _line("Output token throughput (tok/s):", figures["output_throughput"]),
            _line("Total token throughput (tok/s):", figures["total_token_throughput"]),
        ]
        for metric in metrics:
            short, name = TITLES[metric]
            lines += [
                name.center(WIDTH, "-"),
                _line(f"Mean {short} (ms):", figures[f"mean_{metric}_ms"]),
                _line(f"Median {short} (ms):", figures[f"median_{metric}_ms"]),
                *(_line(f"P{p:g} {short} (ms):", figures[f"p{p:g}_{metric}_ms"]) for p in percentiles),
            ]
        return "\n".join([*lines, "=" * WIDTH])

    def _rate(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else math.nan


def check_place(path: Path | None, flag: str) -> None:
    """Raise ConfigError for a file that can't be written, before there are figures to lose. Nothing is written yet."""
    if path is None:
        return
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    file = there == path
    if path.is_dir() or not (file or there.is_dir()) or not os.access(there, os.W_OK):
        raise ConfigError(f"{flag} {path} can't be written. Name a file in a folder that can.")


def save(figures: Mapping[str, Any], path: Path) -> None:
    """Write JSON. Undefined figures (no request succeeded) become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
    path.write_text(json.dumps(clean, indent=1) + "\n", encoding="utf-8")


def _meets(timing: Timing, goals: Mapping[str, float]) -> bool:
    took = {"ttft": timing.ttft, "tpot": timing.tpot, "e2el": timing.latency}
    return all(took[metric] * 1000 <= limit for metric, limit in goals.items())


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{shown:<10}".rstrip()
