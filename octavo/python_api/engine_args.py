"""`EngineArgs`: an object with an engine's settings, for scripts that build settings before the engine."""

from __future__ import annotations

import argparse
from typing import Any, Self, TypeVar

from octavo.cli.flags.args import add_flag
from octavo.cli.flags.table import ENGINE_GROUPS, flags_of
from octavo.config import EngineConfig
from octavo.config.foreign import ENGINE_FLAGS, SHORT

P = TypeVar("P", bound=argparse.ArgumentParser)


class EngineArgs:
    """Any keyword arguments of `LLM`, as attributes: `LLM(**vars(args))` creates the engine.

    Raises:
        ConfigError, TypeError: as `LLM`.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        EngineConfig.of(model=model, **settings)
        self.__dict__.update(settings, model=model)

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Add the engine flags of `octavo serve` to a script's parser, with dashes or underscores.

        Flags that are not given are None. The parsed names are keyword arguments of `LLM`: use
        `LLM(**vars(parser.parse_args()))` if the script has no flags of its own, else `EngineArgs.from_cli_args`. Flags
        of other engines are parsed too, and checked when the engine is created.
        """
        group = parser.add_argument_group("engine")
        for flag in flags_of(ENGINE_GROUPS):
            words = [word for name in (flag.name, *flag.aliases) for word in _spelled(name)]
            add_flag(group, flag, words=words, dest=flag.keyword, default=None)
        shorts: dict[str, list[str]] = {}
        for short, name in SHORT.items():
            shorts.setdefault(name, []).append(short)
        for name, entry in ENGINE_FLAGS.items():
            words = [*shorts.get(name, []), *_spelled(name)]
            common: dict[str, Any] = {"dest": _keyword(name), "default": None, "help": argparse.SUPPRESS}
            if entry.takes_value:
                group.add_argument(*words, **common)
            else:
                group.add_argument(*words, action=argparse.BooleanOptionalAction, **common)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the settings parsed by `add_cli_args`, without the script's own arguments.

        Raises:
            ConfigError: a setting is not supported.
        """
        names = [*(flag.keyword for flag in flags_of(ENGINE_GROUPS)), *map(_keyword, ENGINE_FLAGS)]
        given = {name: getattr(args, name, None) for name in names}
        return cls(**{name: value for name, value in given.items() if value is not None})


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLM.from_engine_args`."""


def _keyword(name: str) -> str:
    return name.replace("-", "_")


def _spelled(name: str) -> list[str]:
    """Return a flag with dashes, and with underscores if that differs."""
    if name.startswith("-"):
        return [name]
    return list(dict.fromkeys([f"--{name}", f"--{_keyword(name)}"]))
