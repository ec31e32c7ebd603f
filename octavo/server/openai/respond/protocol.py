"""Request body of `/v1/responses`, and its conversion to a chat request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.body import check_one_answer, require
from octavo.server.openai.fields import Int
from octavo.server.openai.protocol import ChatBody
from octavo.server.openai.respond.items import messages_of
from octavo.server.origins import Origins, in_names
from octavo.server.validation import explain

InputItems = list[dict[str, Any]]

_LOGPROBS = "message.output_text.logprobs"
_IGNORED = frozenset(
    {
        "background",
        "context_management",
        "max_tool_calls",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
_NAMES = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
)
"""Fields of the chat that a request becomes -> the fields that the client sent."""
_CALLED = {"messages": "input", "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}
"""Fields of chats -> their names in the Responses API."""


def _input(value: Any) -> str | InputItems:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    raise InvalidRequestError("input must be text, or a list of items, and not be empty.")


_ITEMS = {"type": "array", "items": {"type": "object"}, "minItems": 1}
ResponseInput = Annotated[
    str | list[dict[str, Any]],
    BeforeValidator(_input),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, _ITEMS]}),
]


class ResponseBody(BaseModel):
    """`POST /v1/responses`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    input: ResponseInput
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    user: str | None = None
    enable_response_messages: bool | None = None

    @property
    def items(self) -> InputItems:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input


def as_chat(body: ResponseBody, earlier: InputItems) -> ChatBody:
    """Convert the request to a chat completion.

    Args:
        earlier: the items before this request's input.

    Raises:
        InvalidRequestError: an item or a field is malformed.
        UnsupportedError: an item, a tool or an option that this server does not support.
    """
    require(
        body.truncation in (None, "disabled"),
        "truncation",
        body.truncation,
        "truncation must be 'disabled': no part of a conversation is left out.",
    )
    for name, called in _CALLED.items():
        value = (body.model_extra or {}).get(name)
        require(value is None, name, value, f"{name} is called {called} in the Responses API.")
    format_ = (body.text or {}).get("format")
    both = format_ is not None and (body.model_extra or {}).get("structured_outputs") is not None
    require(not both, "text.format", format_, "Cannot specify both structured_outputs and text.format; choose one.")
    include = body.include or []
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": _chat_messages(body, earlier, Origins()),
        "stream": True,  # whole responses are assembled from the same pieces
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": _format(format_),
    }
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.top_logprobs or _LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    chat |= {name: value for name, value in (body.model_extra or {}).items() if name not in _IGNORED}
    try:
        translated = ChatBody.model_validate(chat)
    except ValidationError as exc:
        raise explain(exc) from None
    check_one_answer(translated.n)
    return translated


def _chat_messages(body: ResponseBody, earlier: InputItems, origins: Origins) -> list[dict[str, Any]]:
    return _led_by(body.instructions, messages_of([*earlier, *body.items], len(earlier), origins))


def _led_by(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages after the instructions, in one system message with those of developers that follow at once:
    many chat templates take only one."""
    if not instructions:
        return messages
    parts: list[dict[str, Any]] = [{"type": "text", "text": instructions}]
    at = 0
    while at < len(messages) and messages[at]["role"] in ("system", "developer"):
        content = messages[at]["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
        at += 1
    return [{"role": "system", "content": parts}, *messages[at:]]


@contextmanager
def in_own_names(body: ResponseBody, earlier: InputItems) -> Iterator[None]:
    """Give errors about the chat that a request becomes the names of the request's fields."""

    def names() -> dict[str, str]:
        origins = Origins()
        return origins.names(_chat_messages(body, earlier, origins))

    try:
        with in_names(names):
            yield
    except InvalidRequestError as exc:
        param, message = exc.param or "", exc.message
        for chat, own in _NAMES:
            if param == chat or param.startswith(chat + "."):
                param = own + param.removeprefix(chat)
                raise type(exc)(message.replace(chat, own), param=param, value=exc.value) from None
        if param == "messages":
            raise type(exc)(message, param="input", value=exc.value) from None
        raise


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedError(
            f"tools has one of type {tool.get('type')!r}; this server supports only functions.",
            param="tools",
            value=tool.get("type"),
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise InvalidRequestError("text.format must be an object.", param="text.format", value=form)
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
