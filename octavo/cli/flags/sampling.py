"""The sampling flags, for commands that generate."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from octavo.cli.flags import units
from octavo.cli.flags.parser import OctavoParser


@dataclass(frozen=True, slots=True)
class _Option:
    flag: str
    read: Any
    help: str


_OPTIONS = (
    _Option("temperature", float, "0 always takes the most likely token"),
    _Option("top-p", float, "sample from the smallest set of tokens of this total probability"),
    _Option("top-k", int, "sample from the K most likely tokens"),
    _Option("min-p", float, "leave out tokens less likely than this fraction of the most likely one"),
    _Option("max-tokens", units.count, "maximum number of tokens to generate"),
    _Option("min-tokens", units.natural, "minimum number of tokens to generate"),
    _Option("seed", int, "make the answer reproducible"),
    _Option("repetition-penalty", float, "above 1 discourages tokens already in the conversation"),
    _Option("presence-penalty", float, "above 0 discourages tokens already in the answer"),
    _Option("frequency-penalty", float, "above 0 discourages them in proportion to how often they occur"),
)


def add_sampling_flags(parser: OctavoParser) -> None:
    group = parser.add_argument_group("sampling (defaults are the model's own)")
    for option in _OPTIONS:
        group.add_argument(
            f"--{option.flag}", type=option.read, metavar=option.flag.split("-")[-1].upper(), help=option.help
        )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="continue past the end of the answer")


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the command line sets.

    Raises:
        InvalidRequestError: one is out of range. Checked here, before the model is loaded.
    """
    from octavo.core.params import SamplingParams

    names = [option.flag.replace("-", "_") for option in _OPTIONS]
    fields = {name: value for name in (*names, "stop", "ignore_eos") if (value := getattr(args, name)) is not None}
    SamplingParams(**({"max_tokens": None} | fields))
    return fields
