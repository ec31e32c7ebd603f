"""From what was measured to medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from workloads import WORKLOADS

Runs = dict[str, dict[str, list[float]]]
"""workload -> variant -> figure of every round."""


def medians(runs: Runs) -> dict[str, dict[str, float]]:
    return {
        w: {name: _rounded(statistics.median(values)) for name, values in of.items() if values}
        for w, of in runs.items()
    }


def ratios(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """workload -> Octavo's variant -> peer -> how many times as fast Octavo is; "best peer" is the fastest of them."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for workload, of in figures.items():
        peers = {name: value for name, value in of.items() if not name.startswith("octavo")}
        for name, value in of.items():
            if name.startswith("octavo") and peers:
                each = {peer: _ratio(workload, value, other) for peer, other in peers.items()}
                found.setdefault(workload, {})[name] = {**each, "best peer": min(each.values())}
    return found


def fractions(
    figures: Mapping[str, Mapping[str, float]], floors: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """workload -> variant -> the share of the floor's speed that it reaches."""
    return {
        workload: {name: _ratio(workload, value, floors[workload][name]) for name, value in of.items()}
        for workload, of in figures.items()
    }


def table(title: str, rows: Mapping[str, Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows of figures below each other, as Markdown."""
    lines = [f"| {title} | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_shown(row.get(column)) for column in columns)} |")
    return "\n".join(lines)


def by_variant(of: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """workload -> variant -> x, turned around."""
    turned: dict[str, dict[str, Any]] = {}
    for workload, row in of.items():
        for name, value in row.items():
            turned.setdefault(name, {})[workload] = value
    return turned


def _ratio(workload: str, ours: float, theirs: float) -> float:
    return round(ours / theirs if WORKLOADS[workload].more_is_better else theirs / ours, 3)


def _rounded(value: float) -> float:
    return round(value, 3 if value < 10 else 1)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
