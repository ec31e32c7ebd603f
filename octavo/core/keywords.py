"""Errors for misspelled keyword arguments that suggest the right name."""

from __future__ import annotations

import builtins
import types
import typing
from collections.abc import Iterable
from typing import Any, get_args, get_origin

import msgspec


def near(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return `; did you mean ...?` with up to `most` similar names out of `known`, or "" if none is similar."""
    import difflib  # only an error needs it

    found = difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(found)}?" if found else ""


class Suggesting(msgspec.StructMeta):
    """Metaclass of structs that users create: the error for an unknown keyword suggests a similar field."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:  # noqa: N805  a metaclass
        """Return the struct.

        Raises:
            TypeError: a keyword is not a field, a required field is missing, or a field is given by position.
        """
        try:
            return super().__call__(*args, **fields)
        except TypeError as error:
            names = cls.__struct_fields__
            unknown = next((name for name in fields if name not in names), None)
            if unknown is None:
                raise TypeError(f"{cls.__name__}: {error}; it takes {', '.join(names)}.") from None
            hint = near(unknown, names) or f"; it takes {', '.join(names)}."
            raise TypeError(f"{cls.__name__} has no parameter {unknown!r}{hint}") from None


_WORDS: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "booleans"),
    str: ("a string", "strings"),
    type(None): ("None", "None"),
    Any: ("any value", "any values"),
}


def kind_in_words(kind: Any, *, plural: bool = False) -> str:
    """Return the type `kind` in English, such as "a list of integers or None"."""
    if kind in _WORDS:
        return _WORDS[kind][plural]
    arguments = get_args(kind)
    match get_origin(kind):
        case typing.Annotated:
            return kind_in_words(arguments[0], plural=plural)
        case typing.Union | types.UnionType:
            *first, last = (kind_in_words(one, plural=plural) for one in arguments)
            return f"{', '.join(first)} or {last}"
        case builtins.list:
            return f"{'lists' if plural else 'a list'} of {kind_in_words(arguments[0], plural=True)}"
        case builtins.dict if arguments[1] is not Any:
            names, values = (kind_in_words(one, plural=True) for one in arguments)
            return f"{'dicts' if plural else 'a dict'} from {names} to {values}"
        case builtins.dict:
            return "dicts" if plural else "a dict"
    return str(kind.__name__)
