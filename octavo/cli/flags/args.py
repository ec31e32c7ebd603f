"""Conversion of flags, a config file and the environment to `EngineConfig` and `ServerConfig`.

If a setting is given more than once, the command line takes precedence over the config file, and that over the
environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.cli.flags import units
from octavo.cli.flags.environment import OTHER_WORDS
from octavo.cli.flags.parser import OctavoParser, put
from octavo.cli.flags.table import ENGINE_GROUPS, POOL_GROUPS, SERVER_GROUPS, flags_of
from octavo.config import EngineConfig, ServerConfig
from octavo.config.foreign import FLAGS
from octavo.core.errors import ConfigError
from octavo.core.flag import Flag
from octavo.core.keywords import near
from octavo.features import settings_types

FlagGroups = Mapping[str, tuple[Flag, ...]]
MODEL_HELP = "a name listed by `octavo pull --list`, a folder, a .gguf file or a Hugging Face id (default: smollm2)"
_SWITCH_WORDS = {"1": True, "true": True, "0": False, "false": False}


def add_settings(parser: OctavoParser, groups: FlagGroups, *, without: frozenset[str] = frozenset()) -> None:
    """Add flags for the settings, one titled group each. Flags that are not given are missing in the namespace.

    Args:
        without: names of flags, or single spellings such as "-q", to leave out.
    """
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.name not in without:
                add_flag(group, flag, words=[word for word in flag.spelled() if word not in without])


def add_engine_settings(
    parser: OctavoParser, *, without: frozenset[str] = frozenset(), positional: bool = True
) -> None:
    """Add MODEL (unless `positional` is false), --config, and every flag of the engine."""
    if positional:
        parser.add_argument("model_name", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="YAML file with these flags as keys")
    add_settings(parser, ENGINE_GROUPS, without=without)


def engine_config(parser: OctavoParser, args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings from a parsed command line.

    Raises:
        ConfigError: the config file or an environment variable is invalid; the text names it.
    """
    return engine_from(values(parser, args))


def values(parser: OctavoParser, args: argparse.Namespace) -> dict[str, Any]:
    """Return target -> value of every given setting that this command has."""
    given, known = vars(args), known_flags(parser)
    found = from_environment(known.values(), os.environ)
    if given.get("config"):
        found |= from_file(Path(given["config"]), known, parser)
    found |= {flag.target: given[flag.target] for flag in known.values() if flag.target in given}
    if name := given.get("model_name"):
        if "model.model" in given and given["model.model"] != name:
            raise ConfigError(f"the model is given twice: {name!r} and --model {given['model.model']!r}; leave one out")
        found["model.model"] = name
    targets = {flag.target: flag for flag in known.values()}
    return {target: convert(targets[target], value) for target, value in found.items()}


def known_flags(parser: OctavoParser) -> dict[str, Flag]:
    """Return name -> setting of those that a command has."""
    flags = flags_of(ENGINE_GROUPS, SERVER_GROUPS, POOL_GROUPS)
    return {flag.name: flag for flag in flags if f"--{flag.name}" in parser.flag_names()}


def convert(flag: Flag, value: Any) -> Any:
    return flag.convert(value) if flag.convert else tuple(value) if flag.many else value


def from_environment(flags: Iterable[Flag], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return settings from OCTAVO_* variables, else from VLLM_* variables of the same meaning."""
    found: dict[str, Any] = {}
    for flag in flags:
        for name, read in OTHER_WORDS.get(flag.name, {}).items():
            if value := read(environ.get(name, "")):
                found[flag.target] = read_value(flag, value, f"environment variable {name}")
        for name in (flag.env, flag.env.replace("OCTAVO_", "VLLM_")) if flag.env else ():
            if environ.get(name):
                found[flag.target] = read_value(flag, _word(flag, environ[name]), f"environment variable {name}")
                break
    return found


def _word(flag: Flag, text: str) -> str | bool:
    """Return a variable's text; for a switch its boolean, if the text is one."""
    return _SWITCH_WORDS.get(text.strip().lower(), text) if flag.switch else text


def from_file(path: Path, known: Mapping[str, Flag], parser: OctavoParser) -> dict[str, Any]:
    """Return settings from a YAML file; keys are flag names with dashes or underscores.

    Raises:
        ConfigError: the file does not exist or is not YAML, or a key or value is invalid; the text names it.
    """
    where = f"--config {path}"
    content, written = read_yaml(path, where)
    return {} if content is None else from_mapping(content, written, where, known, parser)


def read_yaml(path: Path, where: str) -> tuple[Any, Any]:
    """Return the content of a YAML file, and its nodes, which have the lines.

    Raises:
        ConfigError: the file does not exist or is not YAML; the text begins with `where`.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def from_mapping(
    content: Any, written: Any, where: str, known: Mapping[str, Flag], parser: OctavoParser
) -> dict[str, Any]:
    """Return settings from `name: value` lines of a YAML file.

    Args:
        content, written: a part of what `read_yaml` returns.

    Raises:
        ConfigError: it is something else, or a key or value is invalid; the text begins with `where`.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must hold `name: value` lines, not a {type(content).__name__}")
    names = {alias: flag for flag in known.values() for alias in (flag.name, *flag.aliases)}
    _refuse_repeated(where, ((key.value, key.start_mark.line + 1) for key, _ in written.value), names)
    found: dict[str, Any] = {}
    for key, value in content.items():
        head, _, below = str(key).partition(".")
        name = head.replace("_", "-").removeprefix("--")
        if below and name in names and names[name].dotted:
            put(found.setdefault(names[name].target, {}), below, value)
        elif name in names and not below:
            found[names[name].target] = read_value(names[name], value, f"{where}: {key}")
        elif name in FLAGS:
            if value is not False:
                parser.judge(name, None if value is True else str(value))
        else:
            raise ConfigError(f"{where}: unknown setting {key!r}{near(name, names, most=3)}")
    return found


def _refuse_repeated(where: str, keys: Iterable[tuple[str, int]], names: Mapping[str, Flag]) -> None:
    """Refuse a setting that is in two lines, also under two names, or as a whole and by key: the last would silently
    win."""
    lines: dict[str, int] = {}
    for key, line in keys:
        head, dot, below = key.partition(".")
        word = head.replace("_", "-").removeprefix("--")
        name = (names[word].name if word in names else word) + dot + below
        for other, at in lines.items():
            if f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}."):
                raise ConfigError(f"{where}: {key} is set in lines {at} and {line}; remove one of them.")
        lines[name] = line


def read_value(flag: Flag, raw: Any, where: str) -> Any:
    """Return a flag's value from text or from a YAML scalar or list.

    Raises:
        ConfigError: the value is malformed; the text begins with `where`.
    """
    if flag.switch:
        if isinstance(raw, bool):
            return raw
        raise ConfigError(f"{where}: must be true or false, not {raw!r}")
    if flag.many:
        items = raw if isinstance(raw, list) else [raw]
        return [_read_one(flag, item, where) for item in items]
    return _read_one(flag, raw, where)


def _read_one(flag: Flag, raw: Any, where: str) -> Any:
    if isinstance(raw, dict) and flag.dotted:
        return raw
    if raw is None:
        raise ConfigError(f"{where}: has no value; give one, or leave the line out")
    if isinstance(raw, (dict, list, bool)):
        raise ConfigError(f"{where}: must be one value, not {raw!r}")
    try:
        value = flag.read(str(raw))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{where}: {raw!r} is not one of {', '.join(flag.choices)}")
    return value


def engine_from(found: Mapping[str, Any]) -> EngineConfig:
    """Return `EngineConfig` with the given settings, and defaults elsewhere."""
    floors: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}, "device": {}, "parallel": {}}
    features: dict[str, dict[str, Any]] = {name: {} for name in settings_types()}
    sections = floors | features
    for target, value in found.items():
        section, field = target.split(".")
        if section in sections:
            sections[section][field] = value
    default = EngineConfig()
    own = {name: kind(**features[name]) for name, kind in settings_types().items()}
    return EngineConfig(
        **{name: replace(getattr(default, name), **fields) for name, fields in floors.items()}, features=own
    )


def server_from(found: Mapping[str, Any]) -> ServerConfig:
    """Return `ServerConfig` with the given settings, and defaults elsewhere."""
    return ServerConfig(
        **{target.removeprefix("server."): value for target, value in found.items() if target.startswith("server.")}
    )


def add_flag(
    group: argparse._ArgumentGroup,
    flag: Flag,
    *,
    words: Sequence[str] | None = None,
    dest: str | None = None,
    default: Any = argparse.SUPPRESS,
) -> None:
    """Add a setting's flag to a parser.

    Args:
        words: its spellings, by default those with dashes.
        dest: the name in the namespace, by default the flag's target.
        default: in the namespace if the flag is not given; by default the name is missing there.
    """
    text = f"{flag.help} (default: {flag.default})".replace("%", "%%")
    common: dict[str, Any] = {"dest": dest or flag.target, "default": default, "help": text}
    words = words or flag.spelled()
    if flag.switch:
        group.add_argument(*words, action=argparse.BooleanOptionalAction, **common)
        return
    if flag.many:
        common |= {"nargs": "+", "action": "extend"}
    metavar = flag.metavar or (None if flag.choices else flag.name.split("-")[-1].upper())
    group.add_argument(*words, type=units.reader(flag.read), choices=flag.choices, metavar=metavar, **common)
