"""Validation of a chat request's tools, and conversion to a `ToolUse`."""

from __future__ import annotations

import re
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.server.body import require
from octavo.server.openai.protocol import ChatBody, ToolBody
from octavo.text.tools.bounds import check_bounds
from octavo.text.tools.loose import json_types
from octavo.text.tools.tool import Mode, Tool, ToolUse

MAX_TOOLS = 512
NAME_PATTERN = "[A-Za-z0-9_.:/-]{1,128}"
_NAME = re.compile(NAME_PATTERN)
_CHOICES = "none, auto, required, or an object that names a function"


def tool_use(body: ChatBody) -> ToolUse | None:
    """Return the callable tools; None for a request without tools.

    Raises:
        InvalidRequestError: a tool is malformed, or the choice names an unknown tool.
    """
    choice = body.tool_choice
    if not body.tools:
        require(
            choice in (None, "none", "auto"),
            "tool_choice",
            choice,
            "tool_choice needs tools; add them or leave it out.",
        )
        return None
    tools = declared_tools(body.tools)
    mode, chosen = _choice(choice, [tool.name for tool in tools])
    if mode == "none":
        return None
    return ToolUse(
        offered=tools,
        callable=tools if chosen is None else [tool for tool in tools if tool.name in chosen],
        mode=mode,
        parallel=body.parallel_tool_calls is not False,
    )


def declared_tools(given: list[ToolBody]) -> list[Tool]:
    """Return the functions of a request.

    Raises:
        InvalidRequestError: one is malformed, or two have the same name.
    """
    require(len(given) <= MAX_TOOLS, "tools", len(given), f"tools must have at most {MAX_TOOLS} entries.")
    tools = [_tool(number, tool) for number, tool in enumerate(given)]
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, "tools", twice, f"tools has the function {twice!r} twice; give each its own name.")
    return tools


def _tool(number: int, body: ToolBody) -> Tool:
    where = f"tools.{number}"
    require(body.type == "function", f"{where}.type", body.type, f"{where}.type must be 'function'.")
    function = body.function
    require(
        _NAME.fullmatch(function.name) is not None,
        f"{where}.function.name",
        function.name,
        f"{where}.function.name must have 1 to 128 letters, digits or characters of _-.:/",
    )
    strict = function.strict is True
    parameters = function.parameters or {}
    if not strict:
        parameters = json_types(parameters)
    kind = parameters.get("type", "object")
    require(
        kind == "object",
        f"{where}.function.parameters",
        kind,
        f"{where}.function.parameters must be the JSON schema of an object.",
    )
    check_bounds(parameters, function.name, f"{where}.function.parameters")
    return Tool(
        name=function.name,
        description=function.description,
        parameters=parameters,
        strict=strict,
    )


def _choice(choice: Any, names: list[str]) -> tuple[Mode, set[str] | None]:
    """Return the mode, and the names that may be called (None for all)."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "named", {_known(name, names)}
        case {"type": "allowed_tools", **rest}:
            return _allowed(rest.get("allowed_tools", rest), names)
    raise InvalidRequestError(f"tool_choice must be {_CHOICES}.", param="tool_choice", value=choice)


def _allowed(given: Any, names: list[str]) -> tuple[Mode, set[str] | None]:
    match given:
        case {"mode": "auto" | "required" as mode, "tools": list(tools)} if tools:
            return mode, {_known(_named(tool), names) for tool in tools}
    raise InvalidRequestError(
        "tool_choice.allowed_tools must have a mode (auto or required) and a list of tools.",
        param="tool_choice",
        value=given,
    )


def _named(tool: Any) -> Any:
    """Return the name of an allowed tool, in the form of either API; None if it has none."""
    match tool:
        case {"function": {"name": name}} | {"name": name}:
            return name
    return None


def _known(name: Any, names: list[str]) -> str:
    if name in names:
        return str(name)
    raise InvalidRequestError(
        f"tool_choice names the function {name!r}, which is not among tools.", param="tool_choice", value=name
    )
