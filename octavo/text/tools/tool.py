"""Tools declared by requests, and which of them must, may or must not be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.text.chat.guard import ContentGuard
from octavo.text.chat.messages import plain_messages
from octavo.text.tools.formats import ToolFormat

Mode = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function. `parameters` is the JSON schema of its arguments, an object.

    With `strict`, a schema that can't be fully enforced is refused; otherwise such parts of it are not enforced.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def declared(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        offered: tools described to the model.
        callable: tools that it may call.
        mode: whether it may, must or must not; "named" requires exactly one call of the only callable tool.
        parallel: whether there may be several calls.
    """

    offered: Sequence[Tool]
    callable: Sequence[Tool]
    mode: Mode
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def several(self) -> bool:
        return self.parallel and self.mode != "named"


def explain_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], form: ToolFormat, guard: ContentGuard
) -> list[dict[str, Any]]:
    """Return messages for a chat template without tools: described in the system message, calls and results as text.

    Args:
        guard: marks text of the request, not the format's own marks written here.

    Raises:
        InvalidRequestError: a past call is not of OpenAI's form.
    """
    plain = [_in_words(message, form) for message in guard.mark(plain_messages(messages))]
    if not tools:
        return plain
    example = form.write("NAME", '{"ARGUMENT": "VALUE"}')
    described = guard.mark([tool.declared()["function"] for tool in tools])
    declared = "\n".join(json.dumps(one, ensure_ascii=False) for one in described)
    text = (
        f"You can call these functions, described as JSON:\n{declared}\n"
        f"To call one, write nothing but:\n{form.group_open}{example}{form.group_close}\n"
        "The result comes back to you, and you go on from there."
    )
    if plain and plain[0].get("role") == "system":
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _in_words(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    plain = dict(message)
    if message.get("role") == "tool":
        return {"role": "user", "content": f"The function returned:\n{message.get('content') or ''}"}
    calls = plain.pop("tool_calls", None)
    if calls:
        written = form.separator.join(_written(number, call["function"], form) for number, call in enumerate(calls))
        content = plain.get("content") or ""
        plain["content"] = f"{content}\n{form.group_open}{written}{form.group_close}".lstrip()
    return plain


def _written(number: int, function: Mapping[str, Any], form: ToolFormat) -> str:
    arguments = function.get("arguments") or "{}"
    return form.write(
        str(function.get("name")),
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        number,
    )
