"""What `octavo simulate`, `octavo tune` and `octavo bench steps` share: the settings that a simulation can change."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.traces import Arrival, read_trace
from octavo.build_sizes import sizes_of, steps_ahead
from octavo.cli.flags import units
from octavo.cli.flags.args import add_engine_settings, engine_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, flags_of
from octavo.simulate.profile import Profile, read_profile
from octavo.simulate.run import SimulatedEngine

CHANGEABLE = frozenset(
    (
        *("max-num-seqs", "max-num-batched-tokens", "performance-mode", "watermark", "scheduling-policy"),
        *("max-model-len", "kv-cache-memory-bytes", "num-gpu-blocks-override", "enable-prefix-caching"),
    )
)
"""Flags of the engine that change no step's time."""
_OTHERS = frozenset(flag.name for flag in flags_of(ENGINE_GROUPS)) - CHANGEABLE
_NOT_SHOWN = frozenset(("model", "node-key"))
_SIZES = ("cache.memory_bytes", "cache.num_blocks")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A profile, a trace, and the settings to simulate.

    Attributes:
        settings: "section.field" -> value: those of the profile, with those of the command line.
    """

    profile: Profile
    arrivals: list[Arrival]
    settings: dict[str, Any]

    def engine(self, **changes: Any) -> SimulatedEngine:
        """Return the engine of the settings, with changes to them.

        Args:
            changes: fields of `SchedulerConfig`.

        Raises:
            ConfigError: the settings do not fit together.
        """
        return engine_of(self.profile, self.settings | {f"scheduler.{name}": value for name, value in changes.items()})


def engine_of(profile: Profile, settings: dict[str, Any]) -> SimulatedEngine:
    """Return the engine that these settings would make of the profile's worker."""
    config = engine_from(settings)
    num_blocks, limits = sizes_of(config, profile.facts, profile.loaded)
    loaded = profile.loaded
    depth = steps_ahead(config, profile.facts)
    return SimulatedEngine(
        limits=limits,
        num_blocks=num_blocks,
        block_size=loaded.block_size,
        policy=config.scheduler.policy,
        depth=depth,
        groups=loaded.groups,
    )


def changeable(found: dict[str, Any]) -> dict[str, Any]:
    """Return those settings of an engine that simulations can change, and how many steps it launches ahead."""
    targets = {flag.target for flag in flags_of(ENGINE_GROUPS) if flag.name in CHANGEABLE}
    return {target: value for target, value in found.items() if target in targets | {"scheduler.depth"}}


def other_flags(found: dict[str, Any]) -> list[str]:
    """Return the other settings of an engine, but its model, as flags. Secrets are left out."""
    words: list[str] = []
    for flag in flags_of(ENGINE_GROUPS):
        value = found.get(flag.target)
        if value is None or flag.name in CHANGEABLE | _NOT_SHOWN:
            continue
        if flag.switch:
            words.append(f"--{flag.name}" if value else f"--no-{flag.name}")
        else:
            words += [f"--{flag.name}", *(map(str, value) if flag.many else [_as_word(value)])]
    return words


def _as_word(value: object) -> str:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)


def add_scenario_flags(parser: OctavoParser) -> None:
    group = parser.add_argument_group("scenario")
    group.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="step times, written by octavo bench steps"
    )
    group.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="requests: written by octavo serve --record-traffic, or lines of JSON with timestamp (ms), input_length, "
        "output_length and hash_ids",
    )
    group.add_argument(
        "--trace-speed", type=units.positive, default=1.0, metavar="X", help="requests arrive X times as fast (1)"
    )
    group.add_argument("--max-concurrency", type=units.count, metavar="N", help="requests at once (no limit)")
    group.add_argument(
        "--front-end-ms",
        type=units.seconds,
        default=0.0,
        metavar="MS",
        help="between client and engine, for HTTP and tokenizing, added to each request; docs/tuning.md says how to "
        "measure it (0: times at the engine)",
    )
    group.add_argument("--num-prompts", type=units.count, metavar="N", help="the first requests only")
    add_engine_settings(parser, without=_OTHERS, positional=False)


def scenario_of(parser: OctavoParser, args: argparse.Namespace) -> Scenario:
    """Return what the flags describe.

    Raises:
        ConfigError: a file can't be read.
    """
    profile = read_profile(args.profile)
    given = values(parser, args)
    settings = dict(profile.settings)
    if any(name in given for name in _SIZES):  # the profile's own size gives way to the given one
        settings = {name: value for name, value in settings.items() if name not in _SIZES}
    return Scenario(profile, read_trace(args.trace, speed=args.trace_speed, most=args.num_prompts), settings | given)
