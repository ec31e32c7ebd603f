"""`StructuredOutputsParams`: the form that a request's output must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.keywords import Suggesting

JSON_WHITESPACE = r"([ ]|\n[ ]{0,40})?"
"""Between the parts of JSON: a space, or a line break with an indent. With more, a model may go on with it for ever."""

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096
UNFOLLOWED = "The form of the output can't be followed: "
"""How the error of a request begins whose form has turned out to be one that can't, once tokens were generated."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "backend": ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"),
    "disable_fallback": (True, False),
    "reasoning_parser": ("",),
    "enable_in_reasoning": (False,),
}
"""Fields that others have, and values with which they ask for what is so anyway: whatever backend makes a form, it is
the same form."""


class StructuredDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the JSON of every request's structured output; a request may ask for more, not for less.

    Attributes:
        disable_any_whitespace: as in `StructuredOutputsParams`, where a request gives no pattern of its own.
        disable_additional_properties: likewise.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> StructuredDefaults:
        """From the setting `structured_outputs_config`.

        Raises:
            ConfigError: a field that there is not, or a value that it can't have; the text names it.
        """
        chosen: dict[str, bool] = {}
        for name, value in config.items():
            if name in cls.__struct_fields__:
                if not isinstance(value, bool):
                    raise ConfigError(f"--structured-outputs-config {name}: {value!r} must be true or false.")
                chosen[name] = value
            elif name not in _NEUTRAL:
                known = ", ".join((*cls.__struct_fields__, *_NEUTRAL))
                raise ConfigError(f"--structured-outputs-config {name}: there is no such field; those are {known}.")
            elif value not in _NEUTRAL[name]:
                words = " or ".join(map(repr, _NEUTRAL[name]))
                raise ConfigError(f"--structured-outputs-config {name}: {value!r} is not supported; it may be {words}.")
        return cls(**chosen)

    def applied(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """A request's form with these defaults."""
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace
            or (self.disable_any_whitespace and params.whitespace_pattern is None),
            disable_additional_properties=params.disable_additional_properties or self.disable_additional_properties,
        )


NO_DEFAULTS = StructuredDefaults()


class StructuredOutputsParams(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one form; the first six fields are the forms. Names follow the field's usage.

    Attributes:
        json: a JSON schema (draft 2020-12), as an object or as its text.
        regex: a regular expression that the whole output matches; no look-around, no back-references.
        choice: the output is one of these strings.
        grammar: a context-free grammar in Lark's notation, or in EBNF with `::=`.
        json_object: any JSON object.
        structural_tag: text with parts of given forms, as an object or as its text.
        disable_any_whitespace: compact JSON, without white space between its parts.
        disable_additional_properties: objects hold only the properties that the schema names.
        whitespace_pattern: a regular expression for the white space between the parts of JSON.
        param: the request's field that this came from, for errors.
        frame: a Lark grammar around the form, which stands in it as `@content`; a frame alone is a form, too. Made by
            the text front end for tool calls and reasoning.

    Raises:
        InvalidRequestError: none or several of the forms are set, or one is empty.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    param: str = "structured_outputs"
    frame: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if self.frame is not None and not given:
            return
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(FORMS)}, got "
                f"{', '.join(given) if given else 'none'}.",
                param=self.param,
                value=given,
            )
        value = getattr(self, given[0])
        # An empty object is a schema that takes any JSON; an empty string or list is nothing.
        if value in ("", []) or (self.choice is not None and not all(self.choice)):
            raise InvalidRequestError(f"{given[0]} of {self.param} must not be empty.", param=self.param, value=value)
        if self.choice is not None and len(self.choice) > MAX_CHOICES:
            raise InvalidRequestError(
                f"choice of {self.param} must have at most {MAX_CHOICES} strings, got {len(self.choice)}.",
                param=self.param,
                value=len(self.choice),
            )

    @property
    def form(self) -> str:
        """The name of the form that is set; "frame" for a frame alone."""
        return next((name for name in FORMS if getattr(self, name) not in (None, False)), "frame")
