"""Flags that say which figures a benchmark reports."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from octavo.bench.report import TITLES
from octavo.cli.flags.parser import OctavoParser
from octavo.core.errors import ConfigError

GOALS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ReportedFigures:
    """Which figures to report.

    Attributes:
        metrics: of `TITLES`.
        percentiles: from 0 to 100.
        goals: metric -> the maximum milliseconds of a good request.
    """

    metrics: list[str]
    percentiles: list[float]
    goals: dict[str, float]


def add_result_flags(parser: OctavoParser) -> argparse._ArgumentGroup:
    """Add the flags; return their group."""
    result = parser.add_argument_group("result")
    result.add_argument("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help=f"of {','.join(TITLES)}")
    result.add_argument("--metric-percentiles", default="99", metavar="LIST", help="such as 50,90,99 (default: 99)")
    result.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="count requests within these")
    return result


def parse_result_flags(args: argparse.Namespace) -> ReportedFigures:
    metrics = [m for m in args.percentile_metrics.split(",") if m]
    if unknown := set(metrics) - set(TITLES):
        raise ConfigError(f"--percentile-metrics supports {', '.join(TITLES)}, not {', '.join(sorted(unknown))}")
    try:
        percentiles = [float(p) for p in args.metric_percentiles.split(",") if p]
    except ValueError as error:
        raise ConfigError(
            f"--metric-percentiles must be numbers such as 50,99, got {args.metric_percentiles}"
        ) from error
    if any(not 0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"--metric-percentiles must lie in [0, 100], got {args.metric_percentiles}")
    return ReportedFigures(metrics, percentiles, dict(map(parse_goal, args.goodput)))


def parse_goal(goal: str) -> tuple[str, float]:
    metric, _, limit = goal.partition(":")
    try:
        if metric in GOALS:
            return metric, float(limit)
    except ValueError:
        pass
    raise ConfigError(f"--goodput {goal!r} must be ttft:MS, tpot:MS or e2el:MS")
