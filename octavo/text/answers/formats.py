"""`AnswerFormats`: how a model writes tool calls and reasoning, as its chat template shows or as the user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.text.answers.reasoning import ReasoningFormat, detect_reasoning, own_marks, reasoning_format
from octavo.text.chat.template import ChatTemplate
from octavo.text.tools.formats import ToolFormat, detect_format, takes_tools, tool_format
from octavo.text.tools.plugin import load_formats

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """
    Attributes:
        tools: how calls are written.
        reasoning: how reasoning is marked; None if it is not.
        template_tools: whether the chat template tells the model about tools; else this must be done in words.
    """

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    template_tools: bool

    @classmethod
    def of(
        cls,
        chat: ChatTemplate | None,
        *,
        tools: str = AUTO,
        reasoning: str = AUTO,
        plugin: str | None = None,
        marks: Mapping[str, Any] | None = None,
    ) -> AnswerFormats:
        """From a chat template, or by name.

        Args:
            plugin: a file that declares more formats of tool calls.
            marks: what `own_marks` takes; they stand before those of `reasoning`, unless that is "none".

        Raises:
            ConfigError: a name that nobody knows, a file that declares no format, or marks that are none.
        """
        own = {} if plugin is None else load_formats(plugin)
        source = "" if chat is None else chat.source
        marked = detect_reasoning(source) if reasoning == AUTO else reasoning_format(reasoning)
        return cls(
            detect_format(source) if tools == AUTO else tool_format(tools, own),
            marked if reasoning == "none" else own_marks(marks or {}) or marked,
            takes_tools(source),
        )
