"""Sources of a conversation's answers: a server over HTTP, or an engine in this process."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from octavo.core.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend

ChatMessages = list[dict[str, str]]


@dataclass(slots=True)
class StreamedAnswer:
    """An answer while it is generated, and its usage."""

    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: float = 0.0

    def add(self, piece: str) -> None:
        if piece and not self.first:
            self.first = time.perf_counter()
        self.text += piece

    def stats(self) -> str:
        ended = self.ended or time.perf_counter()
        first = self.first or ended
        rate = (self.output_tokens - 1) / (ended - first) if self.output_tokens > 1 and ended > first else 0.0
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        return (
            f"{self.prompt_tokens} tokens in{cached}, {self.output_tokens} out; "
            f"first after {(first - self.started) * 1000:.0f} ms, then {rate:.1f} tokens/s"
        )


class Speaker(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: ChatMessages, answer: StreamedAnswer) -> AsyncGenerator[str, None]:
        """Yield the answer's pieces as they arrive, and fill in `answer`."""
        ...

    async def close(self) -> None: ...


class RemoteSpeaker:
    """Client of an OpenAI-compatible server."""

    def __init__(self, url: str, model: str, fields: dict[str, Any], client: httpx.AsyncClient) -> None:
        self.name = f"{model} at {url}"
        self._url, self._model, self._fields, self._client = url, model, fields, client

    @classmethod
    async def connect(
        cls, url: str, fields: dict[str, Any], *, model: str | None, api_key: str | None, client: httpx.AsyncClient
    ) -> RemoteSpeaker:
        """Connect to a server.

        Raises:
            ConfigError: no usable server responds at the URL.
        """
        url = url.rstrip("/").removesuffix("/v1")
        if api_key:
            client.headers["Authorization"] = f"Bearer {api_key}"
        try:
            response = await client.get(f"{url}/v1/models")
            listed = [entry["id"] for entry in response.json()["data"]] if response.is_success else []
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no server answers at {url} ({error}); start one with `octavo serve`") from error
        if not response.is_success:
            raise ConfigError(f"{url}/v1/models: {_error_text(response.status_code, response.text)}")
        if not listed and not model:
            raise ConfigError(f"{url} lists no model; give --model-name")
        return cls(url, model or listed[0], fields, client)

    async def answer(self, messages: ChatMessages, answer: StreamedAnswer) -> AsyncGenerator[str, None]:
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        try:
            async with self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise OctavoError(_error_text(response.status_code, text))
                async for line in response.aiter_lines():
                    if piece := _piece(line, answer):
                        answer.add(piece)
                        yield piece
        except httpx.HTTPError as error:
            raise OctavoError(f"the connection to {self._url} failed: {error or type(error).__name__}") from error
        answer.ended = time.perf_counter()

    async def close(self) -> None:
        await self._client.aclose()


class LocalSpeaker:
    """Client of an engine's front end."""

    def __init__(self, frontend: Frontend, fields: dict[str, Any], engine: contextlib.AsyncExitStack) -> None:
        self.name = frontend.info.name
        self._frontend, self._fields, self._engine = frontend, fields, engine

    async def answer(self, messages: ChatMessages, answer: StreamedAnswer) -> AsyncGenerator[str, None]:
        prompt = self._frontend.render_chat(messages)
        async for piece in generate(self._frontend, prompt, self._fields, answer, rendered=True):
            yield piece

    async def close(self) -> None:
        await self._engine.aclose()


async def generate(
    frontend: Frontend, prompt: str, fields: dict[str, Any], answer: StreamedAnswer, *, rendered: bool = False
) -> AsyncIterator[str]:
    """Yield the pieces of a prompt's completion. `rendered`: a chat template made it, including special tokens.

    Raises:
        InvalidRequestError: a sampling field or the prompt's length is out of range.
    """
    from octavo.core.params import OutputKind

    params = frontend.default_params(**({"max_tokens": None} | fields)).replace(output_kind=OutputKind.DELTA)
    request = frontend.prepare(prompt, params, add_special_tokens=not rendered)
    answer.prompt_tokens = len(request.tokens)
    async for output in frontend.generate(request, prompt):
        choice = output.outputs[0]
        answer.output_tokens += len(choice.token_ids)
        answer.cached_tokens = output.num_cached_tokens
        answer.finish_reason = choice.finish_reason or answer.finish_reason
        if choice.text:
            answer.add(choice.text)
            yield choice.text
        if choice.finish_reason == "error":
            raise OctavoError(f"the engine failed: {choice.stop_reason}")
    answer.ended = time.perf_counter()


def _piece(line: str, answer: StreamedAnswer) -> str:
    """Return the text in one line of a chat stream; store usage and finish reason in `answer`."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return ""
    event = json.loads(data)
    if error := event.get("error"):
        raise OctavoError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    if usage := event.get("usage"):
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
        answer.output_tokens = usage.get("completion_tokens", 0)
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        return str((choice.get("delta") or {}).get("content") or "")
    return ""


def _error_text(status: int, text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(text)["error"]["message"])
    return f"HTTP {status}: {text[:300]}"
