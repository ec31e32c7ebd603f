"""`AnswerFormats`: how a model writes tool calls and reasoning, as its chat template shows or as the user says."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.text.chat import ChatTemplate
from octavo.text.reasoning import ReasoningFormat, detect_reasoning, reasoning_format
from octavo.text.tools.formats import ToolFormat, detect_format, takes_tools, tool_format

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
    def of(cls, chat: ChatTemplate | None, *, tools: str = AUTO, reasoning: str = AUTO) -> AnswerFormats:
        """From a chat template, or by name.

        Raises:
            ConfigError: a name that nobody knows.
        """
        source = "" if chat is None else chat.source
        return cls(
            detect_format(source) if tools == AUTO else tool_format(tools),
            detect_reasoning(source) if reasoning == AUTO else reasoning_format(reasoning),
            takes_tools(source),
        )
