"""Structural tags: free text with constrained sections between begin and end strings.

Two notations are in use: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and `{"format": {...}}`, a
tree of formats (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark

from octavo.core.errors import InvalidRequestError
from octavo.core.json_schema import with_plain_counts

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # only its stub has it


def tags_to_lark(tag: dict[str, Any], json_options: JsonCompileOptions, param: str) -> str:
    """Return the structural tag as a Lark grammar.

    Raises:
        InvalidRequestError: it is in neither notation; the message names what is missing.
    """
    writer = _Writer(json_options, param)
    if "format" in tag:
        start = writer.format(tag["format"], "format")
    elif "structures" in tag:
        tags = [_as_tag(one) for one in writer.objects(tag["structures"], "structures")]
        start = writer.triggered({"triggers": tag.get("triggers"), "tags": tags}, "structures")
    else:
        raise writer.wrong("structural_tag", "must have 'format', or 'structures' and 'triggers'")
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


def _as_tag(one: dict[str, Any]) -> dict[str, Any]:
    """Convert an entry of the first notation to the second."""
    content = {"type": "json_schema", "json_schema": one.get("schema", {})}
    return {"begin": one.get("begin"), "content": content, "end": one.get("end", "")}


class _Writer:
    """Writes rules; each method returns the expression of its part."""

    def __init__(self, json_options: JsonCompileOptions, param: str) -> None:
        self.rules: list[str] = []
        self._options = json_options
        self._param = param
        self._count = 0

    def wrong(self, where: str, what: str, value: Any = None) -> InvalidRequestError:
        return InvalidRequestError(f"structural_tag: {where} {what}.", param=self._param, value=value)

    def format(self, node: Any, where: str) -> str:
        if not isinstance(node, dict):
            raise self.wrong(where, "must be an object", node)
        kind = node.get("type")
        match kind:
            case "const_string":
                return self.string(node.get("value", node.get("text")), f"{where}.value")
            case "json_schema" | "qwen_json":
                return self.json(node.get("json_schema", {}), f"{where}.json_schema")
            case "regex":
                return self.regex(node.get("pattern"), f"{where}.pattern")
            case "any_text":
                return self.terminal(_ANY)
            case "sequence" | "or":
                parts = [
                    self.format(one, f"{where}.elements.{n}")
                    for n, one in enumerate(self.objects(node.get("elements"), f"{where}.elements"))
                ]
                return "(" + (" " if kind == "sequence" else " | ").join(parts) + ")"
            case "tag":
                return self.tag(node, where, skip="")
            case "triggered_tags":
                return self.triggered(node, where)
            case "tags_with_separator":
                return self.separated(node, where)
        kinds = "const_string, json_schema, regex, any_text, sequence, or, tag, triggered_tags, tags_with_separator"
        raise self.wrong(f"{where}.type", f"must be one of {kinds}", kind)

    def tag(self, node: dict[str, Any], where: str, *, skip: str) -> str:
        """Begin, content, end; the prefix `skip` of the beginning is written already."""
        begin = self._text(node.get("begin"), f"{where}.begin")
        end = node.get("end", "")
        ends = [self._text(one, f"{where}.end") for one in (end if isinstance(end, list) else [end])]
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not all(ends):
                raise self.wrong(f"{where}.end", "must not be empty after any_text")
            middle = f"({' | '.join(self.lazy(one) for one in ends)})"
        else:
            middle = self.format(content, f"{where}.content")
            middle += " (" + " | ".join(map(_quoted, ends)) + ")" if any(ends) else ""
        rest = begin[len(skip) :]
        return self.rule(f"{_quoted(rest)} {middle}" if rest else middle)

    def triggered(self, node: dict[str, Any], where: str) -> str:
        """Free text; after a trigger, one of the tags that begin with it follows."""
        triggers = node.get("triggers")
        if not isinstance(triggers, list) or not triggers:
            raise self.wrong(f"{where}.triggers", "must be a list of strings that is not empty", triggers)
        tags = self.objects(node.get("tags"), f"{where}.tags")
        options = []
        for trigger in [self._text(one, f"{where}.triggers") for one in triggers]:
            mine = [one for one in tags if str(one.get("begin", "")).startswith(trigger)]
            if not trigger or not mine:
                raise self.wrong(f"{where}.triggers", "must each be the beginning of a tag", trigger)
            bodies = " | ".join(self.tag(one, f"{where}.tags", skip=trigger) for one in mine)
            options.append(f"{self.lazy(trigger)} ({bodies})")
        strays = [one for one in tags if not any(str(one.get("begin", "")).startswith(str(t)) for t in triggers)]
        if strays:
            raise self.wrong(f"{where}.tags", "must each begin with one of the triggers", strays[0].get("begin"))
        repeat = self.rule(" | ".join(options))
        if node.get("stop_after_first"):
            return repeat if node.get("at_least_one") else f"({repeat} | {self.terminal(_ANY)})"
        return f"{repeat}{'+' if node.get('at_least_one') else '*'} {self.terminal(_ANY)}"

    def separated(self, node: dict[str, Any], where: str) -> str:
        tags = self.objects(node.get("tags"), f"{where}.tags")
        one = self.rule(" | ".join(self.tag(tag, f"{where}.tags.{n}", skip="") for n, tag in enumerate(tags)))
        if node.get("stop_after_first"):
            return one if node.get("at_least_one") else f"({one})?"
        separator = self._text(node.get("separator", ""), f"{where}.separator")
        several = f"{one} ({_quoted(separator)} {one})*" if separator else f"{one}+"
        return several if node.get("at_least_one") else f"({several})?"

    def string(self, value: Any, where: str) -> str:
        return _quoted(self._text(value, where))

    def json(self, schema: Any, where: str) -> str:
        if not isinstance(schema, dict | bool):
            raise self.wrong(where, "must be a JSON schema", schema)
        laid_out = {"x-guidance": self._options, **with_plain_counts(schema)} if isinstance(schema, dict) else schema
        return self.rule("%json " + json.dumps(laid_out))

    def regex(self, pattern: Any, where: str) -> str:
        text = self._text(pattern, where).replace("\n", r"\n")
        return self.terminal(f"/{regex_to_lark(text, use_ascii='')}/")

    def lazy(self, end: str) -> str:
        """Any text up to and including `end`."""
        name = self._name("upto")
        self.rules.append(f"{name}[lazy]: {self.terminal(_ANY)} {_quoted(end)}")
        return name

    def rule(self, body: str) -> str:
        name = self._name("part")
        self.rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = self._name("TEXT")
        self.rules.append(f"{name}: {body}")
        return name

    def objects(self, value: Any, where: str) -> list[dict[str, Any]]:
        if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
            raise self.wrong(where, "must be a list of objects that is not empty", value)
        return value

    def _text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(where, "must be a string", value)
        return value

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"


_ANY = r"/(.|\n)*/"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
