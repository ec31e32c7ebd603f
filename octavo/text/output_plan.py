"""`OutputPlan`: what an answer may consist of, declared once; it makes the grammar and the routers.

    answer:  reasoning? (content | content? calls)

The grammar is Lark's notation as llguidance reads it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import JSON_WHITESPACE, StructuredOutputsParams
from octavo.text.reasoning import ReasoningFormat
from octavo.text.router import Router
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.formats import ToolFormat
from octavo.text.tools.tool import Tool, ToolUse

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """
    Attributes:
        tools: the tools that may be called; None for a request without.
        format: how calls are written.
        reasoning: how reasoning is marked; None if the model marks none.
        thinking: the prompt ends within reasoning.
        content: the form that the content must have.
    """

    format: ToolFormat
    tools: ToolUse | None = None
    reasoning: ReasoningFormat | None = None
    thinking: bool = False
    content: StructuredOutputsParams | None = None

    @property
    def calls(self) -> bool:
        """Whether there may be calls."""
        return self.tools is not None and self.tools.mode != "none"

    @property
    def routes(self) -> bool:
        """Whether the text has to be sorted at all."""
        return self.calls or self.reasoning is not None

    def router(self) -> Router:
        """A new one for one choice."""
        return Router(
            tools=self.format if self.calls else None,
            forced=self.tools is not None and self.tools.forced,
            reasoning=self.reasoning,
            thinking=self.thinking,
        )

    def marks(self) -> list[str]:
        """The texts that a router looks for."""
        form = self.format
        marks = [form.opening, form.name_close, form.call_close, form.group_close] if self.calls else []
        return marks + ([self.reasoning.begin, self.reasoning.end] if self.reasoning else [])

    def form(self, tokenizer: Tokenizer) -> StructuredOutputsParams | None:
        """The form of the whole output, for the engine; None if anything goes.

        Raises:
            InvalidRequestError: the content's form can't be told from calls in this format.
        """
        if not self.calls and (self.content is None or self.reasoning is None):
            return self.content
        frame = _Frame(self, tokenizer).text()
        if self.content is None:
            return StructuredOutputsParams(frame=frame, param="tools")
        return _framed(self.content, frame)


def _framed(content: StructuredOutputsParams, frame: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        **{name: getattr(content, name) for name in content.__struct_fields__ if name != "frame"}, frame=frame
    )


class _Frame:
    """Writes the Lark grammar of a plan; `@content` in it stands for the content's own form."""

    def __init__(self, plan: OutputPlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._special = {
            token.content: number
            for number, token in tokenizer.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._rules: list[str] = []

    def text(self) -> str:
        start = self._body()
        plan = self._plan
        if plan.reasoning is not None:
            end = self._upto(plan.reasoning.end)
            gap = "GAP"
            self._rules.append(f"{gap}: /[ \\n]{{0,4}}/")
            think = f"{end} {gap}"
            start = (
                f"{think} ({start})" if plan.thinking else f"({self._literal(plan.reasoning.begin)} {think})? ({start})"
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
        if form.trigger:
            rest = self._literal(form.opening[len(form.trigger) :])
            return f"TEXT | {self._upto(form.trigger)} {rest} {self._calls()}"
        self._rules.append(f"OTHER: /[^{re.escape(form.opening[0])}](.|\\n)*/")
        return f'"" | OTHER | {self._literal(form.opening)} {self._calls()}'

    def _calls(self) -> str:
        """All that follows the opening of the first call."""
        form, tools = self._plan.format, self._plan.tools
        assert tools is not None
        for number, tool in enumerate(tools.callable):
            schema = _arguments_schema(tool)
            self._rules.append(
                f"call_{number}: {_quoted(tool.name)} {self._literal(form.name_close)} %json {json.dumps(schema)}"
                f" {self._literal(form.call_close)}"
            )
        self._rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools.callable))))
        more = f" ({self._literal(form.separator + form.call_open)} call)*" if tools.several else ""
        return f"call{more} {self._literal(form.group_close)}"

    def _upto(self, mark: str) -> str:
        """Any text, and then the mark."""
        if mark in self._special:
            return f"TEXT {self._literal(mark)}"
        name = f"upto_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*/ {_quoted(mark)}")
        return name

    def _literal(self, text: str) -> str:
        """The text, in which special tokens are named by their ids: they are tokens, not text."""
        return " ".join(self._parts(text))

    def _parts(self, text: str) -> Iterator[str]:
        if not text:
            return
        known = sorted(self._special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, known)) or r"(?!)"
        at = 0
        for match in re.finditer(pattern, text):
            if match.start() > at:
                yield _quoted(text[at : match.start()])
            yield f"<[{self._special[match.group()]}]>"
            at = match.end()
        if at < len(text):
            yield _quoted(text[at:])


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_pattern": JSON_WHITESPACE}
    if not tool.strict:
        options["lenient"] = True
    return {"x-guidance": options, "type": "object", **_closed({"properties": {}} | dict(tool.parameters))}


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not declare, where it leaves that open: functions don't take them."""
    if not isinstance(schema, Mapping) or schema.keys() & _COMPOSED:
        return schema
    closed = dict(schema)
    if isinstance(closed.get("properties"), Mapping):
        closed["properties"] = {name: _closed(one) for name, one in closed["properties"].items()}
        closed.setdefault("additionalProperties", False)
    if "items" in closed:
        closed["items"] = _closed(closed["items"])
    return closed


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
