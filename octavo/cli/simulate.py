"""`octavo simulate`: what the requests of a trace would experience with other settings, without the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.bench.report import WIDTH, Summary, check_place, save
from octavo.cli.bench.results import ReportedFigures, add_result_flags, parse_result_flags
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.simulation import Scenario, add_scenario_flags, scenario_of
from octavo.core.terminal import say
from octavo.simulate.run import SimulatedEngine, Simulation, simulate


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output_json, "--output-json")
    wanted = parse_result_flags(args)
    scenario = scenario_of(parser, args)
    engine = scenario.engine()
    warn_of_sizes(scenario, engine)
    found = simulate(
        engine,
        scenario.arrivals,
        scenario.profile.steps.seconds,
        front_end_s=args.front_end_ms / 1000,
        max_concurrency=args.max_concurrency,
    )
    summary = Summary.of(found.timings, found.duration, wanted.goals)
    print(summary.text(wanted.metrics, wanted.percentiles, title="Simulated Serving Result"))
    print(_engine_text(found))
    if args.output_json:
        save(figures_of(found, summary, wanted), args.output_json)
    refused = next((timing.error for timing in found.timings if timing.error), None)
    if refused:
        say(f"refused ({summary.failed} of {len(found.timings)}): {refused}")
    return 0 if summary.completed else 1


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo simulate",
        description="Run the engine's scheduler and KV cache with the requests of a trace on a virtual clock, with "
        "measured step times in place of the model, and report what clients would measure. Takes those settings of "
        "octavo serve that change no step's time; others need another profile.",
    )
    add_scenario_flags(parser)
    add_result_flags(parser)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def warn_of_sizes(scenario: Scenario, engine: SimulatedEngine) -> None:
    """Say so if steps may be larger than all that were measured."""
    rows, tokens = scenario.profile.largest
    limits = engine.limits
    if limits.max_num_batched_tokens > tokens or limits.max_num_seqs > rows:
        say(
            f"the profile has steps of up to {rows} rows and {tokens} tokens; times of larger ones are extrapolated "
            f"(--max-num-seqs is {limits.max_num_seqs}, --max-num-batched-tokens {limits.max_num_batched_tokens})"
        )


def figures_of(found: Simulation, summary: Summary, wanted: ReportedFigures) -> dict[str, Any]:
    """Return the result in the form that is saved."""
    stats = found.stats
    return summary.figures(wanted.metrics, wanted.percentiles) | {
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "prefix_cache_hit_rate": found.hit_rate,
        "mean_kv_usage": found.kv_mean,
        "max_kv_usage": found.kv_most,
        "device_busy": found.busy,
    }


def _engine_text(found: Simulation) -> str:
    stats = found.stats
    times = found.duration / found.wall_s if found.wall_s else 0.0
    rows = [
        ("Steps:", f"{stats.num_steps}"),
        ("Time in which a step ran:", f"{found.busy:.1%}"),
        ("KV cache in use (mean, most):", f"{found.kv_mean:.1%}, {found.kv_most:.1%}"),
        ("Prompt tokens found in it:", f"{found.hit_rate:.1%}"),
        ("Preemptions:", f"{stats.num_preemptions}"),
        ("Simulated in (s):", f"{found.wall_s:.2f} ({times:,.0f} times real time)"),
    ]
    lines = [f"{label:<40}{value}" for label, value in rows]
    return "\n".join([" Engine ".center(WIDTH, "-"), *lines, "=" * WIDTH])


def arguments(args: argparse.Namespace) -> list[str]:
    """Return the flags that name the requests, for a command that repeats them."""
    found = ["--dataset-name", "timed_trace", "--dataset-path", str(args.trace)]
    if args.trace_speed != 1:
        found += ["--trace-speed", f"{args.trace_speed:g}"]
    return found + (["--num-prompts", str(args.num_prompts)] if args.num_prompts else [])
