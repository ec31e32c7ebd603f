"""`Frame`: the grammar of an answer, of reasoning, content and calls, in Lark's notation as llguidance reads it.

See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidRequestError
from octavo.core.json_schema import alone, with_plain_counts
from octavo.core.structured import FramePart
from octavo.text.tokenizers.tokenizer import Tokenizer
from octavo.text.tools.arguments import arguments_of, undeclared, with_required
from octavo.text.tools.keyed import Keyed, python_words_of, without_null, words_of
from octavo.text.tools.tool import Tool

if TYPE_CHECKING:
    from octavo.text.answers.plan import OutputPlan

# With these, what a schema declares is not all in one place.
_COMPOSED = {
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "unevaluatedProperties",
}
_SPACE = r"[\s\x1c-\x1f]"
"""What Python's `strip` removes."""
_OTHER = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""Name of an argument that is not declared."""


class Frame:
    """Writes the Lark grammar of a plan; `@content` refers to the grammar of the content.

    Attributes:
        parts: the JSON in it, once `text` has been written.
    """

    def __init__(self, plan: OutputPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._special = {
            token.content: number
            for number, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        known = sorted(self._special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._rules: list[str] = []
        self._parts: dict[tuple[str, bool], FramePart] = {}

    @property
    def parts(self) -> tuple[FramePart, ...]:
        return tuple(self._parts.values())

    def text(self) -> str:
        plan = self._plan
        start = self._body()
        if plan.reasoning is not None:
            end = self._upto(plan.reasoning.end)
            gap = "GAP"
            self._rules.append(f"{gap}: /[ \\n]{{0,4}}/")
            think = f"{end} {gap}"
            start = (
                f"{think} ({start})" if plan.inside else f"({self._literal(plan.reasoning.begin)} {think})? ({start})"
            )
        return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *self._rules])

    def _body(self) -> str:
        plan, form = self._plan, self._plan.format
        if not plan.calls:
            return "@content"
        assert plan.tools is not None
        if plan.tools.forced:
            return f"{self._literal(form.opening)} {self._calls()}"
        if plan.content is not None:
            if not form.trigger:
                raise InvalidRequestError(
                    f"{plan.content.param} can't be combined with tools in the format {form.name!r}, in which a call "
                    "looks like JSON content; set tool_choice to required or none.",
                    param=plan.content.param,
                )
            return f"@content | {self._literal(form.opening)} {self._calls()}"
        opens = [plan.reasoning.begin] if plan.reasoning is not None and not plan.inside else []
        if form.trigger:
            text = self._not_opening("CONTENT", opens) if opens else "TEXT"
            rest = self._literal(form.opening[len(form.trigger) :])
            self._rules.append(f"NO_CALL: {text} & ~{_containing(form.trigger)}")
            return f"NO_CALL | {self._upto(form.trigger, text)} {rest} {self._calls()}"
        text = self._not_opening("OTHER", [*opens, form.opening[0]])
        return f"{text} | {self._literal(form.opening)} {self._calls()}"

    def _not_opening(self, name: str, marks: list[str]) -> str:
        """Return the terminal of text that does not begin with a mark.

        The router ignores white space before the reasoning, and between it and the rest; so it does not matter here.
        """
        space = f"{_SPACE}*" if self._plan.reasoning is not None else ""
        ways = "|".join(map(_as_pattern, marks))
        self._rules.append(f"{name}: /(.|\\n)*/ & ~/{space}({ways})(.|\\n)*/")
        return name

    def _calls(self) -> str:
        """Return the rule for everything after the opening of the first call."""
        form, tools = self._plan.format, self._plan.tools
        assert tools is not None
        for number, tool in enumerate(tools.callable):
            name = " ".join([_quoted(tool.name), *self._number(), self._literal(form.name_close)])
            arguments = self._arguments(number, tool)
            self._rules.append(f"call_{number}: {name} {arguments} {self._literal(form.call_close)}")
        self._rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools.callable))))
        more = f" ({self._literal(form.separator + form.call_open)} call)*" if tools.several else ""
        return f"call{more} {self._literal(form.group_close)}"

    def _number(self) -> Iterator[str]:
        mark = self._plan.format.numbered
        if mark:
            yield _quoted(mark)
            yield "/[0-9]{1,4}/"

    def _arguments(self, number: int, tool: Tool) -> str:
        keyed = self._plan.format.keyed
        if keyed is None:
            return self._json(tool, _arguments_schema(tool))
        _check_keyed(tool, self._plan.format.name)
        arguments = arguments_of(tool)
        root = _closed(tool.parameters, tool.strict)
        names = []
        for place, (key, schema) in enumerate(arguments.properties.items()):
            names.append(f"arg_{number}_{place}")
            value = self._value(keyed, tool, f"properties.{key}", schema, root)
            self._rules.append(
                f"{names[-1]}: {self._literal(keyed.key_open)} {self._ended(key, keyed.key_close)} {value}"
            )
        needed = [key in arguments.required for key in arguments.properties]
        separator, other = self._literal(keyed.separator), ""
        if arguments.others is not None:
            other = f"other_{number}"
            known = [name for name in arguments.properties if re.fullmatch(_OTHER, name, re.ASCII)]
            self._rules.append(f"OTHER_{number}: /{_OTHER}/" + (f" & ~/{'|'.join(known)}/" if known else ""))
            value = self._value(keyed, tool, "additionalProperties", arguments.others, root)
            head = f"{self._literal(keyed.key_open)} OTHER_{number} {self._literal(keyed.key_close)}"
            self._rules.append(f"{other}: {head} {value}")
        if not separator:
            ordered = [name if must else f"{name}?" for name, must in zip(names, needed, strict=True)]
            return " ".join([*ordered, f"{other}*"] if other else ordered)
        more = f" ({separator} {other})*" if other else ""
        ways = [self._some(names, needed, separator) + more] if names else []
        if not any(needed):
            ways += [other + more, '""'] if other else ['""']
        return f"({' | '.join(ways)})"

    def _some(self, names: list[str], needed: list[bool], separator: str) -> str:
        """Return the rule of one or more of the names, in order, with separators.

        It is made of those of both halves, so that the grammar is neither large nor deep.
        """
        if len(names) == 1:
            return names[0]
        half = len(names) // 2
        before = self._some(names[:half], needed[:half], separator)
        after = self._some(names[half:], needed[half:], separator)
        rule = f"some_{len(self._rules)}"
        both = f"{before} ({separator} {after}){'' if any(needed[half:]) else '?'}"
        self._rules.append(f"{rule}: {both}" + ("" if any(needed[:half]) else f" | {after}"))
        return rule

    def _ended(self, text: str, mark: str) -> str:
        """Return the text and the mark after it, if possible as one literal.

        With two, a longer text that begins like both would be taken for the only possibility.
        """
        first, *rest = self._pieces(mark)
        joined = [_quoted(text + json.loads(first))] if first.startswith('"') else [_quoted(text), first]
        return " ".join([*joined, *rest])

    def _json(self, tool: Tool, schema: Any, path: str = "") -> str:
        """Return a reference to JSON of this schema; all references to the same schema share it."""
        known = json.dumps(schema), tool.strict
        if known not in self._parts:
            name, where = f"json_{len(self._parts)}", f"the function {tool.name!r}"
            self._parts[known] = FramePart(name=name, schema=known[0], where=where, path=path, strict=tool.strict)
        return f"@{self._parts[known].name}"

    def _value(self, keyed: Keyed, tool: Tool, path: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the rule of a value and its end. The schema is at this path of `root`."""
        kind = keyed.kind(schema)
        if kind == "json":
            close = self._literal(keyed.value_close)
            schema = _as_object(schema)
            ways = [] if keyed.raw else list(map(_quoted, python_words_of(schema)))
            if not ways or schema.get("type") != "boolean":
                ways.insert(0, self._json(tool, alone(_closed(schema, tool.strict), root), path))
            return f"({' | '.join(ways)}) {close}"
        inner, _ = without_null(schema)
        words = words_of(inner)
        if words is None:
            inner = with_plain_counts(inner)
            least, most = inner.get("minLength", 0), inner.get("maxLength", "")
            text = "TEXT" if (least, most) == (0, "") else f"/(.|\\n){{{least},{most}}}/"
            either = f'({text} | "null")' if kind == "nullable" else text
            return self._upto(keyed.value_close, either, short=not least)
        if kind == "nullable":
            words = [*words, "null"]
        return f"({' | '.join(self._ended(word, keyed.value_close) for word in words)})"

    def _upto(self, mark: str, text: str = "TEXT", *, short: bool = True) -> str:
        """Return the rule of text up to and including the mark.

        The text does not contain the mark: not after it was too short to end there, nor spelled by other tokens than
        the special one. If it may be `short`, the first mark ends it anyway.
        """
        number, written = len(self._rules), _as_pattern(mark)
        if any(mark.startswith(one) for one in self._special):
            self._rules.append(f"BEFORE_{number}: {text} & ~{_containing(mark)}")
            return f"BEFORE_{number} {self._literal(mark)}"
        once = "" if short else f" & ~/(.|\\n)*{written}(.|\\n)+/"
        self._rules.append(f"upto_{number}[lazy]: ({text} /{written}/){once}")
        return f"upto_{number}"

    def _literal(self, text: str) -> str:
        """Return the text with special tokens written by their ids: they are tokens, not text."""
        return " ".join(self._pieces(text))

    def _pieces(self, text: str) -> Iterator[str]:
        if not text:
            return
        at = 0
        for match in self._any_special.finditer(text):
            if match.start() > at:
                yield _quoted(text[at : match.start()])
            yield f"<[{self._special[match.group()]}]>"
            at = match.end()
        if at < len(text):
            yield _quoted(text[at:])


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    schema = {"properties": {}} | dict(tool.parameters)
    if not (tool.strict or isinstance(schema["properties"], Mapping)):
        schema["properties"] = {}  # some languages write an empty object as a list
    return {"type": "object", **_closed(schema, tool.strict)}


def _as_object(schema: Any) -> Any:
    return schema if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}


def _check_keyed(tool: Tool, form: str) -> None:
    """Refuse a strict schema that requires more than its properties."""
    beyond = sorted(tool.parameters.keys() & _COMPOSED)
    if tool.parameters.get("additionalProperties", False) is not False:
        beyond.append("additionalProperties")
    if tool.strict and beyond:
        raise InvalidRequestError(
            f"The schema of the function {tool.name!r} has {', '.join(beyond)}, which can't be enforced where "
            f"arguments are written one by one, as in the format {form!r}; leave it out, or set strict to false.",
            param="tools",
        )
    fault = ""
    if not isinstance(tool.parameters.get("properties", {}), Mapping):
        fault = "properties that are no object; correct them"
    elif _contradicts(tool.parameters):
        fault = f"required {', '.join(undeclared(tool.parameters))}, which additionalProperties forbids; declare them"
    if tool.strict and fault:
        text = f"The schema of the function {tool.name!r} has {fault}, or set strict to false."
        raise InvalidRequestError(text, param="tools")


def _closed(schema: Any, strict: bool) -> Any:
    """Return the schema closed to undeclared properties, unless it allows them: functions don't accept them.

    A required property that is not declared may be any value.
    """
    if not isinstance(schema, Mapping) or schema.keys() & _COMPOSED:
        return schema
    closed = dict(schema)
    if isinstance(closed.get("properties"), Mapping):
        if closed.get("additionalProperties", False) is False and not (strict and _contradicts(closed)):
            closed["properties"] = with_required(closed)
        closed["properties"] = {name: _closed(one, strict) for name, one in closed["properties"].items()}
        closed.setdefault("additionalProperties", False)
    if "items" in closed:
        closed["items"] = _closed(closed["items"], strict)
    return closed


def _contradicts(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema requires properties that it forbids."""
    return schema.get("additionalProperties") is False and bool(undeclared(schema))


def _containing(mark: str) -> str:
    return f"/(.|\\n)*{_as_pattern(mark)}(.|\\n)*/"


def _as_pattern(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
