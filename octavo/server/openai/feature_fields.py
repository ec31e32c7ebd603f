"""Fields of OpenAI's API, and of its extensions, that optional features read. Without the feature they are refused.

They are public API, so they stay here without the features, too; `TextHook.body_fields` names their readers.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from octavo.server.openai.fields import Int


class StructuredPart(BaseModel):
    """JSON of a schema, as a part of a frame."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: str
    schema_: Annotated[str, Field(alias="schema")]
    where: str
    path: str = ""
    strict: bool = False


class StructuredOutputs(BaseModel):
    """The form of the output; exactly one of the first six."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    frame: str | None = None
    """Grammar of tools and reasoning, as returned by the /render routes."""
    parts: list[StructuredPart] | None = None
    """Schemas to which that grammar refers."""


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON: `{"type": "json_schema", "json_schema": {"name", "schema", "strict"}}`."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    json_schema: dict[str, Any] | None = None


class FeatureFields(BaseModel):
    """A body's fields for features."""

    thinking_token_budget: Int | None = None
    thinking_budget: Int | None = None
    max_thinking_tokens: Int | None = None
    vllm_xargs: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None


FEATURE_FIELDS = frozenset(FeatureFields.model_fields)
"""Every one of them must be claimed by a feature, or a request that sets it is refused."""

BUDGETS = ("thinking_token_budget", "thinking_budget", "max_thinking_tokens")
"""Fields with a number of tokens, or -1 for no limit."""
FORM_TEXTS = ("guided_json", "guided_regex", "guided_grammar", "regex", "ebnf", "json_schema", "json", "grammar")
"""Fields whose texts are a form of the output, so none may be empty."""
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "grammar")
"""Values of `ResponseFormat.type`."""
