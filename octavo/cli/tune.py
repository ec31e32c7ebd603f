"""`octavo tune`: which settings of the scheduler serve recorded requests within given limits."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from octavo.bench.report import check_place, save
from octavo.bench.traces import Arrival
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.simulate import arguments, warn_of_sizes
from octavo.cli.simulation import Scenario, add_scenario_flags, scenario_of
from octavo.core.terminal import say
from octavo.simulate.goals import Goal, parse_goal
from octavo.simulate.run import SimulatedEngine, Simulation, simulate
from octavo.simulate.search import Search, Settings, Trial

_FLAGS = {
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "policy": "--scheduling-policy",
    "watermark": "--watermark",
}
_POLICIES = ("fcfs", "shortest-first", "longest-first")
_LEAST_TOKENS, _LEAST_SEQS = 64, 8
_SHOWN = 12
"""Rows of the front that are printed."""


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output_json, "--output-json")
    goals = [parse_goal(text) for text in args.goal]
    scenario = scenario_of(parser, args)
    search = _search(scenario, goals, args)
    start = _start(scenario)
    before = search.trial(start)
    if before is None:
        scenario.engine()
        raise AssertionError("`engine` refuses these settings")
    warn_of_sizes(scenario, scenario.engine())
    best = search.best(start, partial(_changes, scenario))
    capacities = [search.capacity(one) for one in (before.settings, best.settings)]
    front = search.front()
    print(_text(goals, before, best, capacities, front, len(search.trials)))
    print("\n".join(["", *_confirm(args, scenario, best)]))
    if args.output_json:
        save(_figures(goals, before, best, capacities, front), args.output_json)
    return 0 if not best.missed else 1


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo tune",
        description="Search the settings of the scheduler that serve the requests of a trace within given limits, with "
        "the simulation of octavo simulate. Prints the settings, what they gain, how much more traffic they hold, and "
        "the commands that confirm it with the model. The exit status is 1 if no settings keep all goals.",
    )
    group = parser.add_argument_group("search")
    group.add_argument(
        "--goal",
        action="append",
        required=True,
        metavar="GOAL",
        help='such as "ttft p99 < 500ms" or "tpot mean < 40ms"; metrics are ttft, tpot, itl, e2el. May be repeated',
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the front and the settings there")
    add_scenario_flags(parser)
    return parser


def _search(scenario: Scenario, goals: Sequence[Goal], args: argparse.Namespace) -> Search:
    def run_one(engine: SimulatedEngine, arrivals: Sequence[Arrival]) -> Simulation:
        profile = scenario.profile
        return simulate(
            engine,
            arrivals,
            profile.steps.seconds,
            front_end_s=args.front_end_ms / 1000,
            max_concurrency=args.max_concurrency,
        )

    def tried(trial: Trial) -> None:
        say(f"{len(search.trials)}: {_flags(trial.settings)}  {_shown(trial, goals)}")

    search = Search(lambda settings: scenario.engine(**settings), run_one, scenario.arrivals, goals, tried)
    return search


def _start(scenario: Scenario) -> dict[str, object]:
    """Return the values, with the defaults, of the settings that are searched."""
    engine = scenario.engine()
    limits = engine.limits
    return {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "policy": engine.policy,
        "watermark": limits.watermark,
    }


def _changes(scenario: Scenario, settings: Settings) -> Iterator[Settings]:
    """Yield changes to try: powers of two up to the largest measured step, and the policies. A policy by the answers'
    lengths is only tried if the trace has what requests asked for."""
    rows, tokens = scenario.profile.largest
    known = all(arrival.max_tokens is not None for arrival in scenario.arrivals)
    ranked = len({arrival.priority for arrival in scenario.arrivals}) > 1
    for size in _powers(_LEAST_TOKENS, tokens):
        yield {"max_num_batched_tokens": size, "max_num_seqs": min(size, cast(int, settings["max_num_seqs"]))}
    for size in _powers(_LEAST_SEQS, rows):
        yield {"max_num_seqs": size}
    for policy in (*(_POLICIES if known else _POLICIES[:1]), *(["priority"] if ranked else [])):
        yield {"policy": policy}
    for fraction in (0.0, 0.02, 0.05):
        yield {"watermark": fraction}


def _powers(least: int, most: int) -> list[int]:
    found = []
    while least <= most:
        found.append(least)
        least *= 2
    return found or [most]


def _flags(settings: Settings) -> str:
    return " ".join(
        f"{_FLAGS[name]} {value:g}" if isinstance(value, float) else f"{_FLAGS[name]} {value}"
        for name, value in settings.items()
    )


def _shown(trial: Trial, goals: Sequence[Goal]) -> str:
    values = ", ".join(f"{goal.name} {value:,.0f} ms" for goal, value in zip(goals, trial.values, strict=True))
    return f"{values}; mean latency {trial.latency:.2f} s, {trial.throughput:,.0f} tokens/s"


def _text(
    goals: Sequence[Goal], before: Trial, best: Trial, capacities: Sequence[float], front: Sequence[Trial], count: int
) -> str:
    lines = [f"Of {count} settings, those that no other is better than in every figure:"]
    lines += [f"  {_flags(one.settings)}\n      {_shown(one, goals)}" for one in front[:_SHOWN]]
    lines += ["", f"Now:          {_shown(before, goals)}", f"Recommended:  {_shown(best, goals)}"]
    for goal, value in zip(goals, best.values, strict=True):
        lines.append(f"  {goal.name} < {goal.limit:g} ms: {'kept' if value <= goal.limit else 'not kept'}")
    words = [f"{speed:.2f} times the rate" if speed else "no rate" for speed in capacities]
    lines.append(f"All goals are kept up to {words[0]} of the trace now, and {words[1]} with the recommended settings.")
    changes = {name: value for name, value in best.settings.items() if before.settings[name] != value}
    lines += ["", _flags(changes) if changes else "Change nothing: no other settings are better."]
    return "\n".join(lines)


def _confirm(args: argparse.Namespace, scenario: Scenario, best: Trial) -> list[str]:
    requests = shlex.join(arguments(args))
    limit = f" --max-concurrency {args.max_concurrency}" if args.max_concurrency else ""
    measured = shlex.join(scenario.profile.flags)
    return [
        "Confirm it with the model, in two terminals:",
        f"  octavo serve {shlex.quote(scenario.profile.model)} {measured} {_flags(best.settings)}".replace("  ", " "),
        f"  octavo bench serve {requests} --ignore-eos{limit}",
    ]


def _figures(
    goals: Sequence[Goal], before: Trial, best: Trial, capacities: Sequence[float], front: Sequence[Trial]
) -> dict[str, Any]:
    def plain(trial: Trial) -> dict[str, Any]:
        values: Mapping[str, float] = {goal.name: value for goal, value in zip(goals, trial.values, strict=True)}
        return {
            "settings": dict(trial.settings),
            "missed": trial.missed,
            "goals_ms": dict(values),
            "mean_latency_s": trial.latency,
            "output_throughput": trial.throughput,
            "preemptions": trial.preemptions,
        }

    return {
        "goals": {goal.name: goal.limit for goal in goals},
        "now": plain(before) | {"capacity": capacities[0]},
        "recommended": plain(best) | {"capacity": capacities[1]},
        "front": [plain(trial) for trial in front],
    }
