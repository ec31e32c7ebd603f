"""Separation of an answer's text into the fields of an assistant's message."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from msgspec import UNSET

from octavo.core.output import CompletionOutput
from octavo.server.openai.responses import FunctionDelta, ToolCall, ToolCallDelta, ToolFunction
from octavo.text.answers.plan import OutputPlan


@dataclass(slots=True)
class ChoiceDelta:
    """New parts of one choice. `finish` is OpenAI's reason, set at the end."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish: str | None = None


class Routed:
    """One choice: parses the engine's output, in pieces or whole.

    Attributes:
        reasoning_tokens: number of its tokens that are reasoning; exact if output arrives in pieces.
    """

    def __init__(self, plan: OutputPlan, *, show_reasoning: bool) -> None:
        self.reasoning_tokens = 0
        self._plan = plan
        self._router = plan.router()
        self._show = show_reasoning
        self._calls = 0

    @property
    def cut(self) -> bool:
        """Whether the last call is incomplete."""
        return self._router.in_arguments

    def take(self, choice: CompletionOutput) -> ChoiceDelta:
        if self._router.transparent:
            finish = choice.finish_reason
            return ChoiceDelta(choice.text, finish=None if finish is None else self._finish(finish))
        inside = self._router.in_reasoning
        news = ChoiceDelta()
        pieces = self._router.push(choice.text)
        if choice.finish_reason is not None:
            pieces += self._router.flush()
        if inside or self._router.in_reasoning:
            self.reasoning_tokens += len(choice.token_ids)
        calls: dict[int, ToolCallDelta] = {}
        for piece in pieces:
            if piece.kind == "content":
                news.content += piece.text
            elif piece.kind == "reasoning":
                news.reasoning += piece.text if self._show else ""
            elif piece.name is not None:
                calls[piece.call] = self._open(piece.call, piece.name, piece.id)
            else:
                known = calls.setdefault(piece.call, ToolCallDelta(piece.call, FunctionDelta()))
                known.function.arguments += piece.text
        news.calls = list(calls.values())
        if choice.finish_reason is not None:
            news.finish = self._finish(choice.finish_reason)
        return news

    def _open(self, call: int, name: str, own_id: str | None) -> ToolCallDelta:
        self._calls += 1
        made = own_id or new_call_id(self._plan.format.id_length)
        return ToolCallDelta(call, FunctionDelta(name=name), made, "function")

    def _finish(self, reason: str) -> str:
        """Return "tool_calls" for complete calls that the model chose to make; not for calls that the request named."""
        named = self._plan.tools is not None and self._plan.tools.mode == "named"
        return "tool_calls" if reason == "stop" and self._calls and not (named or self.cut) else reason


@dataclass(slots=True)
class AccumulatedMessage:
    """One choice as it accumulates."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, news: ChoiceDelta) -> None:
        self.content += news.content
        self.reasoning += news.reasoning
        for call in news.calls:
            if call.id is not UNSET:
                self.calls.append(ToolCall(call.id, ToolFunction(str(call.function.name), "")))
            self.calls[-1].function.arguments += call.function.arguments


def new_call_id(length: int = 0) -> str:
    """Return an id for a tool call: `call_` and 24 characters, or `length` letters and digits."""
    return secrets.token_hex(length)[:length] if length else f"call_{secrets.token_hex(12)}"
