"""Request and response bodies of routes with token ids."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from octavo.core.errors import UnsupportedError
from octavo.core.params import SamplingParams
from octavo.server.body import require
from octavo.server.openai.fields import Int, RequestId
from octavo.server.openai.protocol import CompletionBody, StreamOptions
from octavo.server.openai.responses import ChatLogprobs, PromptLogprobs, Usage
from octavo.server.validation import explain

_SAME = frozenset(SamplingParams.__struct_fields__) & frozenset(CompletionBody.model_fields)
"""Fields of `SamplingParams` with the same name in text completions."""
_DROPPED = frozenset({"output_kind", "skip_reading_prefix_cache"})


class GenerateBody(BaseModel):
    """`POST /inference/v1/generate`. `sampling_params` are used as given, without the model's defaults."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    token_ids: Annotated[list[Int], Field(min_length=1)]
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    features: dict[str, Any] | None = None


def as_completion(body: GenerateBody) -> CompletionBody:
    """Convert the request to a text completion. Without `max_tokens`, the limit is the context.

    Raises:
        InvalidRequestError: a field of `sampling_params` is invalid.
        UnsupportedError: an option that this server does not support.
    """
    if body.features:
        raise UnsupportedError("features are images, audio or video, which are not supported.", param="features")
    given = body.sampling_params or {}
    reads = given.get("skip_reading_prefix_cache")
    name = "sampling_params.skip_reading_prefix_cache"
    require(reads in (None, True, False), name, reads, f"{name} must be true or false.")
    asked: dict[str, Any] = {"max_tokens": None, "vllm_xargs": given.get("extra_args"), "detokenize": None}
    for name, value in given.items():
        if name in _SAME:
            asked[name] = value
        elif name not in _DROPPED and name != "extra_args":
            if name in SamplingParams.__struct_fields__:
                _refuse_unless_neutral(name, value)
            else:
                asked[f"sampling_params.{name}"] = value
    if asked["detokenize"] is None:
        asked["detokenize"] = bool(asked.get("stop"))  # text is needed only to search these
    around = {"prompt": body.token_ids, **_beside(body)}
    for name in ("model", "stream", "stream_options", "cache_salt", "priority", "request_id"):
        around[name] = getattr(body, name)
    try:
        return CompletionBody.model_validate(asked | around)
    except ValidationError as exc:
        raise explain(exc) from None


def _beside(body: GenerateBody) -> dict[str, Any]:
    """Return the undeclared fields, to be checked with those of a completion."""
    found = body.model_extra or {}
    for name, value in found.items():
        text = f"{name} is not a field of this route; if it is a sampling parameter, put it into sampling_params."
        require(name not in CompletionBody.model_fields, name, value, text)
    return found


def _refuse_unless_neutral(name: str, value: Any) -> None:
    """Refuse a field of `SamplingParams` that this route does not support, unless its value is neutral."""
    if value not in (None, False, [], {}, getattr(SamplingParams(), name)):
        raise UnsupportedError(f"sampling_params.{name} is not supported here; leave it out.", param=name, value=value)


class GenerateChoice(msgspec.Struct, frozen=True):
    """Tokens of one choice: all of them, or in a chunk the new ones."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The whole response of `POST /inference/v1/generate`."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | None
    usage: Usage
    warnings: list[str] | UnsetType = UNSET


class GeneratedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed response."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType | None = UNSET
    warnings: list[str] | UnsetType = UNSET


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is computed; valid as the body of `/inference/v1/generate`.

    Attributes:
        token_offsets: each token's begin and end in characters of the prompt's text.
    """

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    token_offsets: list[tuple[int, int]] | None = None
    features: None = None
    kv_transfer_params: None = None
