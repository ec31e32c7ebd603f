"""`StructuredOutputsParams`: the form that a request's output must have."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.keywords import Suggesting

JSON_WHITESPACE = r"([ ]|\n[ ]{0,40})?"
"""White space between the parts of JSON: a space, or a line break with an indent. Without a bound, a model may generate
it forever."""

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096
UNFOLLOWED = "The form of the output can't be followed: "
"""Start of the error text if a form turns out to be impossible after tokens were generated."""


class FramePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """JSON of a schema, as a part of a frame. `where` and `path` are for errors.

    Attributes:
        name: the frame refers to it as `@name`.
        schema: the JSON schema, as text.
        where: description of what it belongs to, for errors.
        path: its place in the schema of that.
        strict: refuse keywords that can't be enforced, instead of leaving them to the model.
    """

    name: str
    schema: str
    where: str
    path: str = ""
    strict: bool = False


class StructuredOutputsParams(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one form; the first six fields are the forms. Names are those of vLLM.

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
        param: the request's field that sets this, for errors.
        frame: a Lark grammar that refers to the form as `@content`; a frame alone is a form, too. Made by the text
            front end for tool calls and reasoning.
        parts: schemas to which the frame refers.

    Raises:
        InvalidRequestError: no form or several are set, or one is empty.
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
    parts: tuple[FramePart, ...] = ()

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
        # An empty object is a schema that accepts any JSON; an empty string or list is not a form.
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
