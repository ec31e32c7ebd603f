"""Request bodies of `/v1/messages`, and their conversion to a chat request.

Reference: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.body import check_one_answer
from octavo.server.openai.fields import Int
from octavo.server.openai.protocol import ChatBody
from octavo.server.origins import Origins
from octavo.server.validation import explain

_IGNORED = frozenset({"metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas"})
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")


class MessageParam(BaseModel):
    """A message; its content is text or a list of blocks."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class MessageTool(BaseModel):
    """A tool; `input_schema` is the JSON schema of its input."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class CountBody(BaseModel):
    """`POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    messages: Annotated[list[MessageParam], Field(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    @property
    def user(self) -> str | None:
        """`metadata.user_id`, if it is a text."""
        metadata = (self.model_extra or {}).get("metadata")
        user = metadata.get("user_id") if isinstance(metadata, dict) else None
        return user if isinstance(user, str) else None


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None


def as_chat(body: CountBody) -> ChatBody:
    """Convert the request to a chat completion.

    Raises:
        InvalidRequestError: a block or a choice is malformed.
        UnsupportedError: a block that this model can't read.
    """
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if body.messages[-1].role == "assistant":  # the answer continues it
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tools or body.tool_choice:
        chat |= _choice(body.tool_choice)
    chat |= _thinking(body.thinking)
    chat |= _output(body.output_config or {}) | chat  # without thinking, no effort
    if isinstance(body, MessagesBody):
        chat |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in _IGNORED}
    if container := extra.pop("container", None):
        raise UnsupportedError(
            "container is not supported: this server runs no code. Leave it out.", param="container", value=container
        )
    if extra.get("context_management") in (None, {}, {"edits": []}):  # else it is warned about, as unknown fields are
        extra.pop("context_management", None)
    chat |= extra
    try:
        translated = ChatBody.model_validate(chat)
    except ValidationError as exc:
        raise explain(exc) from None
    check_one_answer(translated.n)
    return translated


def own_names(body: CountBody) -> dict[str, str]:
    """Return the fields of `as_chat` that are about messages -> those that the client sent."""
    origins = Origins()
    return origins.names(_messages(body, origins))


def _messages(body: CountBody, origins: Origins | None = None) -> list[dict[str, Any]]:
    origins = origins or Origins()
    messages: list[dict[str, Any]] = []
    system = _system(body.system)
    if system:
        messages.append(origins.note({"role": "system", "content": system}, "system"))
    for number, turn in enumerate(body.messages):
        where = f"messages.{number}.content"
        if isinstance(turn.content, str):
            own = [{"role": turn.role, "content": turn.content}]
        elif turn.role == "assistant":
            own = [_assistant(turn.content, where, origins)]
        else:
            own = _user(turn.content, where, turn.role, origins)
        messages += [origins.note(one, f"messages.{number}") for one in own]
    return messages


def _system(given: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """Return the system's content without the line that Claude Code begins it with for Anthropic's billing: it differs
    in each request, so that no prompt would begin like one in the cache."""
    content = _content(given or "", "system", Origins())
    if isinstance(content, str):
        return _BILLING.sub("", content)
    kept = [part | {"text": _BILLING.sub("", part["text"])} for part in content]
    return [part for part, whole in zip(kept, content, strict=True) if part["text"] or not whole["text"]]


def _assistant(blocks: Sequence[dict[str, Any]], where: str, origins: Origins) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(name_id), "name": str(name), "input": dict(given)}:
                function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
                call = {"id": name_id, "type": "function", "function": function}
                named = {"function.arguments": "input", "function.name": "name"}
                calls.append(origins.note(call, f"{where}.{number}", named))
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                raise _unreadable(block, f"{where}.{number}")
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if texts or not calls:
        message["content"] = _parts(texts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[dict[str, Any]], where: str, role: str, origins: Origins) -> list[dict[str, Any]]:
    """Return each tool result as a message of its own, followed by the user's content."""
    results, parts = [], []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str()} | {"type": "image"}:
                parts.append(_part(block, f"{where}.{number}", origins))
            case {"type": "tool_result", "tool_use_id": str(call)}:
                content = _content(block.get("content") or "", f"{where}.{number}.content", origins)
                results.append({"role": "tool", "tool_call_id": call, "content": content})
            case _:
                raise _unreadable(block, f"{where}.{number}")
    return results + ([{"role": role, "content": parts}] if parts or not results else [])


def _content(content: Any, where: str, origins: Origins) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of blocks.", param=where, value=content)
    images = where != "system"
    return [_part(block, f"{where}.{number}", origins, images=images) for number, block in enumerate(content)]


def _part(block: Any, where: str, origins: Origins, *, images: bool = True) -> dict[str, Any]:
    """Return a block of text, or an image, as a part of a chat's content."""
    match block:
        case {"type": "text", "text": str(text)}:
            return origins.note({"type": "text", "text": text}, where)
        case {"type": "image", "source": {"type": "url", "url": str(url)}} if images:
            made = {"type": "image_url", "image_url": {"url": url}}
            return origins.note(made, where, {"image_url.url": "source.url", "image_url": "source"})
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}} if images:
            made = {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
            return origins.note(made, where, {"image_url.url": "source.data", "image_url": "source"})
        case {"type": "image", "source": {"type": "file"}}:
            raise UnsupportedError(
                f"{where} is an image of the Files API, which is not supported; send it in base64 or as a URL.",
                param=where,
            )
    raise _unreadable(block, where)


def _parts(texts: list[str]) -> list[dict[str, Any]]:
    """Return texts as the parts of a content; the chat template decides how they are joined."""
    return [{"type": "text", "text": text} for text in texts]


def _unreadable(block: Any, where: str) -> InvalidRequestError:
    kind = block.get("type") if isinstance(block, dict) else None
    known = ("text", "image", "tool_use", "tool_result", "thinking")
    if isinstance(kind, str) and kind not in known:
        return UnsupportedError(f"{where} is of type {kind!r}, which this model can't read.", param=where, value=kind)
    return InvalidRequestError(f"{where} is not a complete block of type {', '.join(known)}.", param=where, value=kind)


def _tool(tool: MessageTool) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise UnsupportedError(
            f"The tool {tool.name!r} is of type {tool.type!r}, which this server does not run; describe your own.",
            param="tools",
            value=tool.type,
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _thinking(given: dict[str, Any] | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"include_reasoning": False} if (given or {}).get("display") == "omitted" else {}
    match given:
        case None | {"type": "adaptive"}:
            return shown
        case {"type": "disabled"}:
            return {"reasoning_effort": "none"}
        case {"type": "enabled", "budget_tokens": int(tokens)} if tokens >= 0 and not isinstance(tokens, bool):
            return shown | {"thinking_token_budget": tokens, "chat_template_kwargs": {"enable_thinking": True}}
    raise InvalidRequestError(
        "thinking must be of type enabled, with budget_tokens, or disabled, or adaptive.", param="thinking", value=given
    )


def _output(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `output_config`. Keys that it lacks keep their names, to be warned about."""
    effort = config.get("effort")
    if not isinstance(effort, str | None):
        raise InvalidRequestError(
            "output_config.effort must be a string, such as low.", param="output_config.effort", value=effort
        )
    others = {f"output_config.{key}": value for key, value in config.items() if key not in ("effort", "format")}
    return {"reasoning_effort": effort} | _format(config.get("format")) | others


def _format(form: Any) -> dict[str, Any]:
    match form:
        case None:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}
    raise InvalidRequestError(
        "output_config.format must be of type json_schema, with an object as its schema.",
        param="output_config.format",
        value=form,
    )


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    given = choice or {"type": "auto"}
    parallel = {"parallel_tool_calls": not given.get("disable_parallel_tool_use", False)}
    match given:
        case {"type": "auto" | "none" as mode}:
            return parallel | {"tool_choice": mode}
        case {"type": "any"}:
            return parallel | {"tool_choice": "required"}
        case {"type": "tool", "name": str(name)}:
            return parallel | {"tool_choice": {"type": "function", "function": {"name": name}}}
    raise InvalidRequestError(
        "tool_choice.type must be auto, any, none, or tool with a name.", param="tool_choice", value=choice
    )
