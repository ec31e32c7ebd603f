"""OpenAI's response bodies, as msgspec structs: encoding a chunk takes about a microsecond.

A field that is UNSET is left out of the JSON; None is written as null, as OpenAI does.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class CachedTokens(msgspec.Struct, frozen=True):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokens(msgspec.Struct, frozen=True):
    """Breakdown of the generated tokens. Rejected draft tokens are not among them, and are not charged anywhere."""

    reasoning_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one HTTP request. Each prompt counts once, regardless of `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class Timings(msgspec.Struct, frozen=True):
    """Timings of one request; None for milestones not reached, which streams leave out.

    Attributes:
        time_to_first_token_ms: from its first step to its first token, without the time in the queue.
        generation_time_ms: from its first token to its last.
        mean_itl_ms: mean time between two tokens.
        tokens_per_second: all tokens, over the time from its first step to its last token.
    """

    time_to_first_token_ms: float | UnsetType | None
    generation_time_ms: float | UnsetType | None
    queue_time_ms: float | UnsetType | None
    mean_itl_ms: float | UnsetType | None
    tokens_per_second: float | UnsetType | None

    def streamed(self) -> Timings:
        """Return the form for a chunk."""
        return Timings(*(UNSET if value is None else value for value in msgspec.structs.astuple(self)))


class TopLogprob(msgspec.Struct, frozen=True):
    """A candidate token. `bytes` are the token's, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token and the most likely candidates at its position, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a text completion choice; `text_offset` counts characters from the start of the output."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ToolFunction(msgspec.Struct):
    """The function that is called, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that the assistant makes."""

    id: str
    function: ToolFunction
    type: str = "function"


class FunctionDelta(msgspec.Struct):
    """New parts of a call: its name, once, and more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """New parts of a call; the first has its id."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message. `reasoning` is set for models that mark it, under both names that clients use."""

    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token: token id -> candidate, the token itself first. None for the first token."""


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole response of `POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_text: str | None = None
    metrics: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """New parts of an assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """New parts of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
    metrics: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or its new parts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole response of `POST /v1/completions`, or one event of it; both have the same form."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    metrics: Timings | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions of a model, in an older form of OpenAI's API."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One name under which the model is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str]
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct, frozen=True):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    prompt: str
