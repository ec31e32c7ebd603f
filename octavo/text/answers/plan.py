"""`OutputPlan`: the possible parts of an answer, from which the grammar and the routers are made.

answer:  reasoning? (content | content? calls)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from octavo.core.structured import StructuredOutputsParams
from octavo.text.answers.frame import Frame
from octavo.text.answers.reasoning import ReasoningFormat
from octavo.text.answers.router import Kinds, Router
from octavo.text.tokenizers.tokenizer import Tokenizer
from octavo.text.tools.arguments import arguments_of
from octavo.text.tools.formats import ToolFormat
from octavo.text.tools.keyed import ValueKind
from octavo.text.tools.tool import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """The possible parts of an answer.

    Attributes:
        tools: the callable tools; None for a request without.
        format: the format of calls.
        reasoning: the marks of reasoning; None if the model does not mark it.
        inside: the prompt ends within reasoning.
        content: the required form of the content.
    """

    format: ToolFormat
    tools: ToolUse | None = None
    reasoning: ReasoningFormat | None = None
    inside: bool = False
    content: StructuredOutputsParams | None = None

    @property
    def calls(self) -> bool:
        """Whether there may be calls."""
        return self.tools is not None and self.tools.mode != "none"

    @property
    def ends_at_repetition(self) -> bool:
        """Whether a call identical to an earlier one ends the list of calls.

        Under `required` the model did not choose to make calls, and a small one repeats one call up to the limit. A
        model that is free to call may repeat a call on purpose (two rolls of a die).
        """
        return self.tools is not None and self.tools.mode == "required" and self.tools.parallel

    def ender(self) -> Callable[[str], bool] | None:
        """Return a detector for one choice, or None: takes text in pieces and returns True at the answer's end."""
        if not self.ends_at_repetition:
            return None
        router = self.router()

        def ends(text: str) -> bool:
            router.push(text)
            return router.repeated

        return ends

    def router(self) -> Router:
        """Return a new router for one choice."""
        return Router(
            tools=self.format if self.calls else None,
            kinds=self._kinds(),
            forced=self.tools is not None and self.tools.forced,
            apart=self.content is not None,
            once=self.ends_at_repetition,
            reasoning=self.reasoning,
            inside=self.inside,
        )

    def _kinds(self) -> Kinds:
        keyed = self.format.keyed
        if keyed is None or self.tools is None:
            return {}
        kinds: dict[str, dict[str | None, ValueKind]] = {}
        for tool in self.tools.callable:
            arguments = arguments_of(tool)
            kinds[tool.name] = {name: keyed.kind(schema) for name, schema in arguments.properties.items()}
            if arguments.others is not None:
                kinds[tool.name][None] = keyed.kind(arguments.others)
        return kinds

    def marks(self) -> list[str]:
        """Texts that a router looks for."""
        form = self.format
        marks = [form.opening, form.name_close, form.call_close, form.group_close] if self.calls else []
        if self.calls and form.keyed is not None:
            marks += [form.keyed.key_open, form.keyed.key_close, form.keyed.value_close]
        return marks + ([self.reasoning.begin, self.reasoning.end] if self.reasoning else [])

    def form(self, tokenizer: Tokenizer) -> StructuredOutputsParams | None:
        """Return the form of the whole output, for the engine; None if it is unconstrained.

        Raises:
            InvalidRequestError: the content's form can't be distinguished from calls in this format.
        """
        if not self.calls and (self.content is None or self.reasoning is None):
            return self.content
        frame = Frame(self, tokenizer)
        if self.content is None:
            return StructuredOutputsParams(frame=frame.text(), parts=frame.parts, param="tools")
        return msgspec.structs.replace(self.content, frame=frame.text(), parts=frame.parts)
