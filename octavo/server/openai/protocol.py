"""OpenAI's request bodies, with the parameters that other engines add.

A null field counts as missing. Undeclared fields are kept in `model_extra`: those that are known elsewhere but not
supported are refused by `unsupported.py`; the others are named in the answer's `warnings`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from octavo.server.openai.feature_fields import FeatureFields
from octavo.server.openai.fields import Content, Int, LogitBias, PromptList, RequestId, Role, SavedTensors, Texts
from octavo.text.prompts.message_parts import MessageParts, taken


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the usage; `continuous_usage_stats` adds it, so far, to every chunk."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionRule(BaseModel):
    """The rule that detects a repeating output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_pattern_size: Int
    min_pattern_size: Int = 1
    min_count: Int = 3
    min_tokens: Int = 0


class GenerationBody(FeatureFields):
    """Common fields of chat and text completions."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None
    n: Int | None = None
    seed: Int | None = None
    stop: Texts = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = None
    max_tokens: Int | None = None

    # Accepted for compatibility with OpenAI; without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int | None = None
    request_id: RequestId | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    return_token_offsets: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: Annotated[list[Int], Field(min_length=1)] | None = None
    stream_interval: Int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[Int] | None = None
    repetition_detection: RepetitionRule | None = None

    @property
    def streamed(self) -> bool:
        return self.stream is True

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def extra(self) -> dict[str, Any]:
        """Undeclared fields."""
        return self.model_extra or {}


class Message(BaseModel):
    """One message of a conversation. Undeclared fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: Content = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return "\n".join(self.content) if isinstance(self.content, list) else self.content or ""


class FunctionBody(BaseModel):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    """A tool; only functions are supported."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: str
    function: FunctionBody


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    documents: list[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None
    echo: bool | None = None
    _parts: MessageParts | None = None

    @property
    def parts(self) -> MessageParts | None:
        """Return the non-text parts, which the messages' contents mark."""
        return self._parts

    @model_validator(mode="wrap")
    @classmethod
    def _take_parts(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        messages = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list):
            return handler(value)
        plain, found = taken(messages)
        body = handler(value if found is None else value | {"messages": plain})
        body._parts = found
        return body


class ChatBatchBody(ChatBody):
    """`POST /v1/chat/completions/batch`: several conversations, each with one choice in one answer."""

    # A list of what the base class takes.
    messages: Annotated[list[Annotated[list[Message], Field(min_length=1)]], Field(min_length=1)]  # type: ignore[assignment]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. Without `max_tokens` it generates 16; with `max_tokens: null` the rest of the context.

    With `prompt_embeds`, the prompt may be left out, or empty.
    """

    prompt: PromptList
    prompt_embeds: SavedTensors = None
    suffix: str | None = None
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    detokenize: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _embeds_suffice(cls, value: Any) -> Any:
        embeds = isinstance(value, dict) and value.get("prompt_embeds")
        return value | {"prompt": ""} if embeds and not value.get("prompt") else value

    @property
    def choices(self) -> int:
        """Number of choices to generate; with `best_of`, more than are returned."""
        n = self.answered
        return max(n, self.best_of or 0) if n > 0 else n  # invalid values are reported unchanged

    @property
    def only_echo(self) -> bool:
        """Whether only the prompt and its data are requested."""
        return self.echo is True and self.max_tokens == 0

    @property
    def answered(self) -> int:
        return 1 if self.n is None else self.n


class TokenizeBody(BaseModel):
    """`POST /tokenize`: the tokens of a `prompt`, or of `messages` as the chat template writes them."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolBody] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """`POST /detokenize`: the text of `tokens`."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: list[Int]
