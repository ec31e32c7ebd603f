"""Validation and normalization of chat messages in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.text.chat.content_format import Taken

_ATTACHED = ("image", "images", "audio", "audios", "video", "videos")
"""Fields of messages that hold media, in the APIs of other servers."""


class CallArguments(dict[str, Any]):
    """The arguments of a call: an object, and JSON where a template writes or appends them as text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def plain_messages(
    messages: Sequence[Mapping[str, Any]], *, taken: Taken = "strings", none: bool = False
) -> list[dict[str, Any]]:
    """Return the messages with each content as the template takes it, and the arguments of tool calls as objects.

    A string is a list of one part, where there must be parts. A list is one string, its parts joined by newlines, where
    there must be strings. Where both are read it stays a list. The result of a tool is always one text, since templates
    that read it as a list mean one of results; so is a system message, since many read only its first part.

    Args:
        none: the content of a message that has only calls is None, instead of empty.

    Raises:
        InvalidRequestError: empty, or not of OpenAI's form; the message names the place and the reason. `param` is
            "messages".
        UnsupportedError: a part that is not text.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _invalid("messages must be a list of objects with role and content", messages)
    if not messages:
        raise _invalid("messages must hold at least one message", messages)
    return [_plain(message, f"messages[{number}]", taken, none=none) for number, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, taken: Taken, *, none: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role must be a string such as 'user'", role)
    attached = next((name for name in _ATTACHED if message.get(name)), None)
    if attached is not None:
        raise UnsupportedError(
            f"{where}.{attached} is not supported: images are parts of the content, as in OpenAI's API.",
            param="messages",
            value=message[attached],
        )
    plain = dict(message)
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _plain_calls(calls, f"{where}.tool_calls")
    else:
        plain.pop("tool_calls", None)  # templates may ask only whether there is the field
    content = message.get("content")
    if content is None and not calls:
        raise _invalid(f"{where}.content is missing", content)
    texts = _texts(content, f"{where}.content")
    whole = role in ("system", "developer", "tool")
    texts = ["\n".join(texts)] if whole and len(texts) > 1 else texts
    listed = taken == "parts" or (taken == "either" and isinstance(content, list | tuple) and not whole)
    if content is None and none:
        return plain | {"content": None}
    plain["content"] = [{"type": "text", "text": text} for text in texts] if listed else "\n".join(texts)
    return plain


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise _invalid(f"{where} must be a string or a list of text parts", content)
    return [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise UnsupportedError(
            f"{where} is of type {kind!r}; this model takes only parts of type 'text'.", param="messages", value=kind
        )
    raise _invalid(f"{where} must be {{'type': 'text', 'text': ...}}", part)


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise _invalid(f"{where} must be a list", calls)
    return [_plain_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _invalid(f"{where}.function must be an object with name and arguments", function)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise _invalid(f"{where}.function.name must be the name of a function", name)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as exc:
            raise _invalid(f"{where}.function.arguments is not valid JSON: {exc}", arguments) from exc
    if isinstance(arguments, Mapping):
        arguments = CallArguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _invalid(what: str, value: Any) -> InvalidRequestError:
    return InvalidRequestError(f"{what}.", param="messages", value=value)
