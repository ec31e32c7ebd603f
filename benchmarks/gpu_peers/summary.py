"""From what was measured to medians, spreads, ratios and one table.

A result file is read back for this (`python benchmarks/gpu_peers --table FILE`), so that tables in the documentation
are printed, not typed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lines import LINES

_STREAM_FIGURES = {
    "ttft_p50_ms": "time to first token, p50, ms",
    "ttft_p99_ms": "time to first token, p99, ms",
    "itl_p50_ms": "between events, p50, ms",
    "tpot_p50_ms": "per output token, p50, ms",
}
_STARTS = {
    "start_cold_s": "server, exec to ready, empty caches, s",
    "start_warm_s": "server, exec to ready, full caches, s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of several engines.

    Attributes:
        runs: engine -> the figure of each of its runs.
    """

    name: str
    words: str
    more_is_better: bool
    runs: Mapping[str, Sequence[float]]

    def median(self, engine: str) -> float | None:
        return statistics.median(self.runs[engine]) if self.runs.get(engine) else None

    def spread(self, engine: str) -> float | None:
        """(Most - least) / median of an engine's runs; None if it ran once."""
        runs, median = self.runs.get(engine, ()), self.median(engine)
        return (max(runs) - min(runs)) / median if len(runs) > 1 and median else None

    def ratio(self, ours: str, theirs: str) -> float | None:
        """How many times as fast `ours` is."""
        a, b = self.median(ours), self.median(theirs)
        if not a or not b:
            return None
        return a / b if self.more_is_better else b / a


def rows(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """The rows of all that was measured: offline lines, streams at each rate, starts."""
    for line in LINES.values():
        for policy, runs in _by_policy(engines, line.name).items():
            words = line.words if policy == "fcfs" else f"the same, {policy}"
            name = line.name if policy == "fcfs" else f"{line.name}, {policy}"
            yield Row(name, f"{words}, {line.unit}", line.more_is_better, runs)
    for rate in _rates(engines):
        for key, words in _STREAM_FIGURES.items():
            runs = {n: [run[key] for run in e.get("http", {}).get(rate, [])] for n, e in engines.items()}
            yield Row(f"HTTP {rate}/s", words, False, _some(runs))
    for key, words in _STARTS.items():
        starts = {name: [engine[key]] for name, engine in engines.items() if key in engine}
        if starts:
            yield Row("start", words, False, starts)


def summarize(engines: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with medians, spreads and ratios, for the result file."""
    found = []
    for row in rows(engines):
        peers = [name for name in row.runs if name != "octavo"]
        found.append(
            {
                "name": row.name,
                "figure": row.words,
                "medians": {name: _rounded(row.median(name)) for name in row.runs},
                "spread": {n: _rounded(row.spread(n)) for n in row.runs if row.spread(n) is not None},
                "octavo_times_as_fast_as": {peer: _rounded(row.ratio("octavo", peer)) for peer in peers},
            }
        )
    return found


def table(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row per figure, a column per engine, and how many times as fast Octavo is.

    `x ± y %` is a median and half the distance between the largest and the smallest run.
    """
    names = sorted({name.split()[0] for name in engines}, key=lambda name: (name != "octavo", name))
    peers = [name for name in names if name != "octavo"]
    lines = [
        _line(["", "", *names, *(f"octavo / {peer}" for peer in peers)]),
        "| --- " * (2 + len(names) + len(peers)) + "|",
    ]
    for row in rows(engines):
        ratios = [row.ratio("octavo", peer) for peer in peers]
        cells = [*(_cell(row, name) for name in names), *("" if r is None else f"{r:.2f}" for r in ratios)]
        lines.append(_line([row.name, row.words, *cells]))
    return "\n".join(lines)


def _by_policy(engines: Mapping[str, Mapping[str, Any]], line: str) -> dict[str, dict[str, Sequence[float]]]:
    """Policy -> engine -> runs. Engines without the policy keep their own order and are compared in every row."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    for name, engine in engines.items():
        if runs := engine.get("lines", {}).get(line):
            found.setdefault(engine["policy"], {})[name.split()[0]] = runs
    peers = {name: runs for name, runs in found.get("fcfs", {}).items() if name != "octavo"}
    return {policy: {**runs, **peers} for policy, runs in sorted(found.items())}


def _rates(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = {rate for engine in engines.values() for rate in engine.get("http", {})}
    return sorted(found, key=float)


def _some(runs: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: values for name, values in runs.items() if values}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(row: Row, engine: str) -> str:
    value, spread = row.median(engine), row.spread(engine)
    if value is None:
        return ""
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
    return shown if spread is None else f"{shown} ± {50 * spread:.1f} %"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
