"""`AnswerFormats`: the formats of a model's tool calls and reasoning, from its chat template or the settings."""

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
    """How a model writes tool calls and reasoning.

    Attributes:
        tools: the format of tool calls.
        reasoning: the marks around reasoning; None if the model does not mark it.
        template_tools: whether the chat template describes tools to the model; otherwise the system message does.
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
        """Detect the formats from a chat template, or select them by name.

        Args:
            plugin: a file that declares more formats of tool calls.
            marks: arguments of `own_marks`; they override those of `reasoning`, unless that is "none".

        Raises:
            ConfigError: an unknown name, a file that declares no format, or invalid marks.
        """
        own = {} if plugin is None else load_formats(plugin)
        source = "" if chat is None else chat.source
        marked = detect_reasoning(source) if reasoning == AUTO else reasoning_format(reasoning)
        return cls(
            detect_format(source) if tools == AUTO else tool_format(tools, own),
            marked if reasoning == "none" else own_marks(marks or {}) or marked,
            takes_tools(source),
        )
