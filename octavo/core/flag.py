"""`setting`: a field of a settings dataclass, with all that its flag, environment variable and documentation need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from octavo.core import parsing, quantities

_KEY = "flag"


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of the command line, the config file and the environment.

    Attributes:
        name: without the dashes.
        target: "section.field" of the config that it sets; sections are those of `EngineConfig`, names of features, and
            "server".
        help: description in the help and the docs.
        default: shown in the help; the value itself is the field's default.
        read: converts text to a value; raises ValueError.
        choices: allowed values; None for any.
        aliases: other names; short ones with their dash.
        switch: `--name` / `--no-name`, without a value.
        many: takes one or more values.
        convert: converts the value to the field's value, if they differ.
        env: environment variable that sets it, also read with the prefix VLLM_ instead of OCTAVO_.
    """

    name: str = ""
    target: str = ""
    help: str
    default: str
    read: Callable[[str], Any]
    metavar: str | None
    choices: tuple[str, ...] | None
    aliases: tuple[str, ...]
    switch: bool
    many: bool
    convert: Callable[[Any], Any] | None
    env: str | None

    @property
    def dotted(self) -> bool:
        """Whether `--name.key value` sets one key of its JSON object."""
        return self.read is parsing.json_object

    @property
    def keyword(self) -> str:
        """The flag's name as a keyword of `LLM`."""
        return self.name.replace("-", "_")

    def spelled(self) -> tuple[str, ...]:
        return tuple(name if name.startswith("-") else f"--{name}" for name in (self.name, *self.aliases))


def setting(
    default: Any,
    help: str,  # noqa: A002 (argparse's word)
    *,
    flag: str = "",
    shown: str | None = None,
    read: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    switch: bool | None = None,
    many: bool | None = None,
    convert: Callable[[Any], Any] | None = None,
    env: str | None = None,
) -> Any:
    """Return a dataclass field that carries its flag. The arguments are attributes of `Flag`, except:

    Args:
        default: of the field. A bool makes a switch, a tuple a flag of many values, a dict one that takes JSON.
        choices: by default those of a `Literal`.
        flag: name of the flag, if it is not the field's with dashes.
        shown: text of the default in the help, if the value does not say it.
    """
    is_json = isinstance(default, dict)
    described = Flag(
        name=flag,
        help=help,
        default=_text(default, read) if shown is None else shown,
        read=read or (parsing.json_object if is_json else str),
        metavar="JSON" if is_json else metavar,
        choices=choices,
        aliases=aliases,
        switch=isinstance(default, bool) if switch is None else switch,
        many=isinstance(default, tuple) if many is None else many,
        convert=convert,
        env=env,
    )
    if is_json:
        return field(default_factory=default.copy, metadata={_KEY: described})
    return field(default=default, metadata={_KEY: described})


def declared(section: str, kind: type[Any]) -> Mapping[str, Flag]:
    """Return field name -> flag of a settings dataclass, in the order of its fields. `section` begins their targets."""
    found = {}
    for one in fields(kind):
        flag: Flag = one.metadata[_KEY]
        # Types are strings where annotations are postponed. octavo/config/ does not: evaluating them takes time.
        hint = get_type_hints(kind)[one.name] if isinstance(one.type, str) else one.type
        found[one.name] = msgspec.structs.replace(
            flag,
            name=flag.name or one.name.replace("_", "-"),
            target=f"{section}.{one.name}",
            choices=flag.choices or (get_args(hint) if get_origin(hint) is Literal else None),
        )
    return found


def _text(default: Any, read: Callable[[str], Any] | None) -> str:
    """Return a default as a user would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if read is quantities.size:
        return quantities.show_size(default)
    if isinstance(default, dict):
        return "{}"
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    return f"{default:g}" if isinstance(default, float) else "none" if default is None else str(default)
