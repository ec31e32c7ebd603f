"""Conversion of Ollama's requests to those of OpenAI's routes."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.server.errors import ApiError
from octavo.server.ollama.protocol import (
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaMessage,
)

_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Option -> field of OpenAI's routes; the others keep their names."""
_WITHOUT_EFFECT = frozenset(
    {
        # How Ollama loads a model, which the server's settings decide here.
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread"),
        # Prompts are not shifted, penalties count prompt and answer, and Mirostat's settings are read with `mirostat`.
        *("num_keep", "repeat_last_n", "penalize_newline", "mirostat_tau", "mirostat_eta"),
    }
)
_FIELDS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
}
"""Field of OpenAI's routes -> where Ollama's clients set it."""
_WORDS = re.compile(rf"\b({'|'.join(_FIELDS)})\b")


def in_own_words(error: ApiError) -> ApiError:
    """Return the error with the names that the client's fields have."""

    def renamed(text: str) -> str:
        return _WORDS.sub(lambda found: _FIELDS[found[0]], text)

    param = None if error.param is None else renamed(error.param)
    return ApiError(error.status, renamed(error.message), param=param, headers=error.headers)


def chat_of(body: OllamaChatBody, model: str) -> dict[str, Any]:
    """Return the body for `/v1/chat/completions`.

    Raises:
        InvalidRequestError: a field is malformed.
    """
    messages = _messages(body.messages or [])
    chat = _common(body, model) | _reasoning(body.think) | {"messages": messages}
    if body.tools:
        chat["tools"] = [tool.model_dump() for tool in body.tools]
    return chat | _chat_logprobs(body)


def chat_of_prompt(body: OllamaGenerateBody, model: str) -> dict[str, Any]:
    """Return the body for `/v1/chat/completions` of a prompt that is to be answered."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    user = {"role": "user", "content": _content(body.prompt, body.images)}
    chat = _common(body, model) | _reasoning(body.think) | {"messages": [*system, user]}
    return chat | _chat_logprobs(body)


def completion_of(body: OllamaGenerateBody, model: str) -> dict[str, Any]:
    """Return the body for `/v1/completions` of a prompt that is to be continued.

    Raises:
        UnsupportedError: a field that only a chat has.
    """
    for name in ("system", "images", "think"):
        if value := getattr(body, name):
            raise UnsupportedError(
                f"{name} can't be used where the prompt is continued without a chat template (raw, suffix, or a "
                "model that has none); leave it out.",
                param=name,
                value=value,
            )
    completion = _common(body, model) | {"prompt": body.prompt or ""}
    completion.setdefault("max_tokens", None)  # as many as fit, not OpenAI's default
    if body.suffix:
        completion["suffix"] = body.suffix
    return completion | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})


def _common(body: OllamaGenerationBody, model: str) -> dict[str, Any]:
    return (
        {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        | _sampling(body.options or {})
        | _format(body.format)
        | (body.model_extra or {})
    )


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    given = {
        _RENAMED.get(name, name): value
        for name, value in options.items()
        if name not in _WITHOUT_EFFECT and value is not None
    }
    for name in ("max_tokens", "seed"):  # -1 stands for no limit, and for any seed
        if isinstance(given.get(name), int) and given[name] < 0:
            del given[name]
    return given


def _format(form: str | dict[str, Any] | None) -> dict[str, Any]:
    if not form:
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(form, dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}}
    raise InvalidRequestError('format must be "json" or a JSON schema, as an object.', param="format", value=form)


def _reasoning(think: bool | str | None) -> dict[str, Any]:
    if think is None or think == "":
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    return {"chat_template_kwargs": {"enable_thinking": True}} | ({} if think is True else {"reasoning_effort": think})


def _chat_logprobs(body: OllamaGenerationBody) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": body.top_logprobs} if body.logprobs else {}


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages with an id for each call, which Ollama's lack: results follow their calls in order."""
    unanswered: deque[tuple[str, str]] = deque()
    found: list[dict[str, Any]] = []
    calls = 0
    for number, message in enumerate(messages):
        told: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking:
            told["reasoning_content"] = message.thinking
        if message.tool_calls:
            made = [
                _call(call, f"messages.{number}.tool_calls", calls + i) for i, call in enumerate(message.tool_calls)
            ]
            calls += len(made)
            unanswered.extend((one["function"]["name"], one["id"]) for one in made)
            told["tool_calls"] = made
        if message.role == "tool":
            told |= _result(message, unanswered)
        found.append(told | (message.model_extra or {}))
    return found


def _result(message: OllamaMessage, unanswered: deque[tuple[str, str]]) -> dict[str, Any]:
    """Return which call a result answers: the first one without a result, of this tool if the message names it."""
    name = message.tool_name
    call = next((one for one in unanswered if name in (None, one[0])), None)
    if call is not None:
        unanswered.remove(call)
    given = message.tool_call_id or (call[1] if call else None)
    return {"tool_call_id": given, "name": name or (call[0] if call else None)}


def _call(call: dict[str, Any], where: str, number: int) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **others}} if isinstance(others.get("arguments", {}), dict):
            arguments = json.dumps(others.get("arguments", {}), ensure_ascii=False)
        case _:
            raise InvalidRequestError(
                f"{where} must be objects like {{'function': {{'name': 'clock', 'arguments': {{}}}}}}.",
                param=where,
                value=call,
            )
    made = call.get("id")
    # Nine characters, as templates of Mistral's models want them.
    call_id = made if isinstance(made, str) and made else f"call{number:05d}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(text: str | None, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text or ""
    # The kind of an image is read from its bytes.
    pictures = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in images]
    return [*pictures, *([{"type": "text", "text": text}] if text else [])]
