"""Request bodies of Ollama's API.

Reference: https://docs.ollama.com/api
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from octavo.server.openai.fields import Int
from octavo.server.openai.protocol import ToolBody


class OllamaBody(BaseModel):
    """Common fields. `keep_alive` has no effect: the server's model stays loaded."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaGenerationBody(OllamaBody):
    """Common fields of `/api/chat` and `/api/generate`."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    @property
    def streamed(self) -> bool:
        return self.stream is not False


class OllamaMessage(BaseModel):
    """A message; `images` are base64, `tool_name` is the tool whose result this is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(OllamaGenerationBody):
    """`POST /api/chat`. Without messages, it says that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolBody] | None = None


class OllamaGenerateBody(OllamaGenerationBody):
    """`POST /api/generate`: an answer to one prompt, or with `raw` its continuation. Without a prompt, it says that the
    model is loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[Int] | None = None


class OllamaEmbedBody(OllamaBody):
    """`POST /api/embed`. Unless `truncate` is false, inputs are cut to the model's context."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Int | None = None


class OllamaEmbeddingsBody(OllamaBody):
    """`POST /api/embeddings`, the older form for one text."""

    prompt: str


class OllamaModelBody(BaseModel):
    """`POST /api/show` and `POST /api/pull`; `name` is the older word for `model`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


BODIES: list[type[BaseModel]] = [
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaModelBody,
]
