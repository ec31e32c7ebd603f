"""Conversion of a conversation's items, in the form of the Responses API, to chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.origins import Origins

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def messages_of(
    items: Sequence[dict[str, Any]], earlier: int = 0, origins: Origins | None = None
) -> list[dict[str, Any]]:
    """Return chat messages; calls are merged into the preceding assistant message, and reasoning into what follows it.

    Calls that were cut off are left out, unless there is an output for them: their arguments are not JSON.

    Args:
        earlier: how many of them, at the beginning, are of earlier responses.
        origins: notes which items become which messages.

    Raises:
        InvalidRequestError: an item is malformed.
        UnsupportedError: an item of an unknown type.
    """
    origins = origins or Origins()
    messages: list[dict[str, Any]] = []
    answered = [item.get("call_id") for item in items if item.get("type") == "function_call_output"]
    thought = ""
    for number, item in enumerate(items):
        where = "previous_response_id" if number < earlier else f"input.{number - earlier}"
        before, thought = thought, ""
        match item:
            case {"type": "function_call", "status": "incomplete", "call_id": call} if call not in answered:
                pass
            case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(arguments)}:
                function = {"name": name, "arguments": arguments}
                caller = _caller(messages, before, where, origins)
                made = {"id": call, "type": "function", "function": function}
                named = {"function.arguments": "arguments", "function.name": "name"}
                caller["tool_calls"].append(origins.note(made, where, named))
            case {"type": "function_call_output", "call_id": str(call), "output": output}:
                content = _content(output, f"{where}.output", origins)
                messages.append(origins.note({"role": "tool", "tool_call_id": call, "content": content}, where))
            case {"type": "reasoning"}:
                thought = before + "\n".join(_texts(item.get("content") or [], f"{where}.content"))
            case {"role": str(role), "content": content} if item.get("type", "message") == "message":
                told = {"reasoning_content": before} if before and role == "assistant" else {}
                own: dict[str, Any] = {"role": role, "content": _content(content, f"{where}.content", origins), **told}
                messages.append(origins.note(own, where))
            case {"type": str(kind)} if kind not in ("message", "function_call", "function_call_output"):
                raise UnsupportedError(f"{where} is of type {kind!r}, which is not supported.", param=where)
            case _:
                raise InvalidRequestError(
                    f"{where} must be a message with role and content, a function_call or its output.", param=where
                )
    return messages


def told_item(number: int, item: dict[str, Any]) -> dict[str, Any]:
    """Return an input item as clients read it: with an id and a status, a content as a list of parts."""
    told = {"id": item.get("id") or f"item_{number}", "type": "message", "status": "completed"} | item
    content = item.get("content")
    if isinstance(content, str):
        part: dict[str, Any] = {"type": "input_text", "text": content}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        told["content"] = [part]
    return told


def _caller(messages: list[dict[str, Any]], thought: str, where: str, origins: Origins) -> dict[str, Any]:
    """Return the last message if it is the assistant's, else a new one; with the thought, and a list of calls."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append(origins.note({"role": "assistant"}, where))
    caller = messages[-1]
    caller.setdefault("tool_calls", [])
    if thought:
        caller["reasoning_content"] = caller.get("reasoning_content", "") + thought
    return caller


def _content(content: Any, where: str, origins: Origins) -> str | list[dict[str, Any]]:
    """Return a text, or its parts as a chat has them; the chat template decides how they are joined."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for place, part in _listed(content, where):
        if isinstance(part, dict) and part.get("type") == "input_image":
            parts.append(origins.note(_image(part, place), place, {"image_url.url": "image_url"}))
        elif isinstance(part, dict) and part.get("type") == "input_audio":
            parts.append(origins.note({"type": "input_audio", "input_audio": part.get("input_audio")}, place))
        else:
            parts.append(origins.note({"type": "text", "text": _text(part, place)}, place))
    return parts


def _texts(content: Any, where: str) -> list[str]:
    return [_text(part, place) for place, part in _listed(content, where)]


def _listed(content: Any, where: str) -> list[tuple[str, Any]]:
    """Return (place, part) of each part."""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of parts.", param=where, value=content)
    return [(f"{where}.{number}", part) for number, part in enumerate(content)]


def _text(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise UnsupportedError(f"{place} is of type {kind!r}, which is not supported.", param=place)
    text = part.get("refusal") if kind == "refusal" else part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place} must have a text.", param=place)
    return text


def _image(part: dict[str, Any], place: str) -> dict[str, Any]:
    """Return an image as a chat has it."""
    if part.get("file_id") is not None:
        raise UnsupportedError(
            f"{place}.file_id is not supported; send the image as a URL in image_url.", param=f"{place}.file_id"
        )
    url = part.get("image_url")
    if not isinstance(url, str):
        raise InvalidRequestError(f"{place} must have a URL as its image_url.", param=place)
    return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
