"""`Flag`: one setting of the command line, the config file and the environment."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.cli.flags import units


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting.

    Attributes:
        name: without the dashes.
        target: "section.field" of the config that it sets; sections are those of `EngineConfig`, names of features, and
            "server".
        help: description in the help and the docs.
        default: shown in the help; the value itself is in the dataclass.
        read: converts text to a value.
        aliases: other names; short ones with their dash.
        switch: `--name` / `--no-name`, without a value.
        many: takes one or more values.
        convert: converts the value to the field's value, if they differ.
        env: environment variables that set it, each also read with the prefix VLLM_ instead of OCTAVO_.
    """

    name: str
    target: str
    help: str
    default: str = ""
    read: Callable[[str], Any] = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    switch: bool = False
    many: bool = False
    convert: Callable[[Any], Any] | None = None
    env: str | None = None

    @property
    def dotted(self) -> bool:
        """Whether `--name.key value` sets one key of its JSON object."""
        return self.read is units.json_object

    def spelled(self) -> tuple[str, ...]:
        return tuple(name if name.startswith("-") else f"--{name}" for name in (self.name, *self.aliases))


def dtype(text: str) -> str:
    return {"float": "float32", "half": "float16"}.get(text, text)


def item_or_list(text: str) -> list[str]:
    """Parse one value, or a JSON list of values."""
    if not text.startswith("["):
        return [text]
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a value nor a JSON list of strings")
    return items


def flat(items: list[list[str]]) -> tuple[str, ...]:
    return tuple(item for part in items for item in part)
