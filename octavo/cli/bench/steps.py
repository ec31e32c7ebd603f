"""`octavo bench steps`: how long steps take, by their size, for simulations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.bench.report import check_place
from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings, engine_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.progress import open_display
from octavo.cli.simulation import changeable, other_flags
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.info import ModelInfo
from octavo.core.terminal import say
from octavo.core.worker_info import LoadedFacts, WorkerFacts
from octavo.engine.loop import EngineLoop
from octavo.simulate.measure import Meter, StepTimer
from octavo.simulate.model import FitErrors, MeasuredStep, StepModel, errors_of, fit
from octavo.simulate.profile import FORM, Profile, write_profile
from octavo.version import __version__


def run(argv: list[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check_place(args.output, "--output")
    found = values(parser, args)
    config = engine_from(found)
    _check(config)
    profile = _measure(args, config, found)
    write_profile(profile, args.output)
    print(_text(profile.steps, profile.errors))
    say(f"profile saved as {args.output}")
    return 0


def make_parser() -> OctavoParser:
    parser = OctavoParser(
        "octavo bench steps",
        words="[MODEL]",
        description="Measure single steps of an engine by their size, fit a model of their times, test it with a mixed "
        "load, and write it for octavo simulate and octavo tune.",
    )
    group = parser.add_argument_group("steps")
    group.add_argument("--output", type=Path, default=Path("profile.json"), metavar="FILE", help="(profile.json)")
    group.add_argument(
        "--rounds", type=units.count, default=3, metavar="N", help="take medians of this many rounds (3)"
    )
    group.add_argument(
        "--seconds",
        type=units.seconds,
        default=90.0,
        metavar="S",
        help="for all rounds; the largest sizes are left out when they are used up (90)",
    )
    add_engine_settings(parser)
    return parser


def _check(config: EngineConfig) -> None:
    """Raise ConfigError for engines that simulations can't have."""
    parallel = config.parallel
    if parallel.pipeline_parallel_size > 1 or parallel.cache_ranks > 1:
        raise ConfigError(
            "octavo bench steps measures engines whose steps run one after the other on all devices: leave "
            "--pipeline-parallel-size and data-parallel attention out. For replicas, simulate one with its share of "
            "the requests."
        )


def _measure(args: argparse.Namespace, config: EngineConfig, found: dict[str, Any]) -> Profile:
    from octavo.build import build_core
    from octavo.text.sources import model_files

    facts: list[tuple[WorkerFacts, LoadedFacts]] = []
    with open_display() as display:
        files = model_files(config.model, weights=config.needs_weights, progress=display.download)
        loop, info = build_core(config, files, on_facts=lambda *found: facts.append(found))
    if "generate" not in info.tasks:
        loop.close()
        raise ConfigError(
            f"{info.name} generates no text, so its requests have one step each; there is nothing to tune."
        )
    ((worker, loaded),) = facts
    try:
        meter = _meter(loop, info, worker, loaded, config, args.seconds)
        alone = meter.sizes(args.rounds, say)
        say("a mixed load, to test the model")
        model = fit(alone)
        errors = errors_of(model, meter.mixed())
    finally:
        loop.close()
    return Profile(
        form=FORM,
        version=__version__,
        model=info.name,
        settings=changeable(found),
        flags=other_flags(found),
        facts=worker,
        loaded=loaded,
        depth=int(meter.ahead),
        largest=_largest(alone),
        steps=model,
        errors=errors,
    )


def _meter(
    loop: EngineLoop, info: ModelInfo, worker: WorkerFacts, loaded: LoadedFacts, config: EngineConfig, seconds: float
) -> Meter:
    from octavo.build_sizes import sizes_of, steps_ahead

    _, limits = sizes_of(config, worker, loaded)
    ahead = steps_ahead(config, worker) > 0
    return Meter(loop, limits, info.kv_tokens, info.vocab_size, StepTimer(loaded.groups), ahead, seconds)


def _largest(steps: list[MeasuredStep]) -> tuple[int, int]:
    rows = max(one.shape.tokens for one in steps if one.shape.decodes)
    return rows, max(one.shape.tokens for one in steps)


def _text(model: StepModel, errors: FitErrors) -> str:
    lines = ["Rows of one token -> ms:"]
    lines += [
        f"{size:>8,} {seconds * 1000:10.2f}"
        for size, seconds in zip(model.decode.sizes, model.decode.seconds, strict=True)
    ]
    lines += ["Tokens of a step with a prompt -> ms:"]
    lines += [
        f"{size:>8,} {seconds * 1000:10.2f}"
        for size, seconds in zip(model.mixed.sizes, model.mixed.seconds, strict=True)
    ]
    lines += [
        f"Besides, for 1,000 cached positions read: {model.key_s * 1e6:.3f} ms",
        f"For 1,000 pairs of attention in prompts: {model.pair_s * 1e6:.4f} ms",
        f"For each token sampled beside prompts: {model.sample_s * 1e3:.3f} ms",
        f"Of {errors.steps} steps of a mixed load: error {errors.median:.1%} (median), {errors.p90:.1%} (90 %), "
        f"{errors.total:+.1%} of their sum",
    ]
    return "\n".join(lines)
