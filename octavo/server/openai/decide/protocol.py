"""Request and response bodies of `POST /v1/decisions`, as in OpenAI's client."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from octavo.core.errors import InvalidRequestError, UnsupportedError

_TEXTS = ("input_text", "output_text")


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError("must be a string or a list of parts.")
    return "\n".join(map(_part, value))


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        raise UnsupportedError("Decisions take text input only: images are not supported. Leave out input_image.")
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return json.dumps(part["data"], ensure_ascii=False)
    raise InvalidRequestError("a part must be an object of the type input_text, with text, or input_json, with data.")


_PARTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]},
}
Wording = Annotated[str, BeforeValidator(_words), WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS]})]


class _DecisionModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class Turn(_DecisionModel):
    """One message of the input."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Wording
    type: Literal["message"] = "message"


def _turns(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_TURN = {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role", "content"]}
Said = Annotated[
    list[Turn],
    BeforeValidator(_turns),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TURN}]}),
]


class _QuestionModel(_DecisionModel):
    instructions: Wording
    name: str | None = None


class PredicateQuestion(_QuestionModel):
    """Whether a statement is true, as a probability."""

    type: Literal["predicate"]


class Choice(_DecisionModel):
    value: str | bool
    description: str = ""


class ChoiceQuestion(_QuestionModel):
    """Which of several choices applies."""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=255)]


class Level(_DecisionModel):
    label: str
    description: str = ""


class ScoreQuestion(_QuestionModel):
    """A position on a scale; the lowest level counts 0, the next 1."""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=10)]


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


def _plain(schema: dict[str, Any]) -> None:
    """Remove the discriminator: each kind of question declares its type."""
    schema.pop("discriminator", None)


_OneQuestion = Annotated[Question, Field(discriminator="type", json_schema_extra=_plain)]


class DecisionBody(_DecisionModel):
    """`input` is the text or the messages that all questions are about.

    `prompt_cache_*` and `safety_identifier` are for OpenAI's own service and have no effect.
    """

    input: Said
    questions: Annotated[list[_OneQuestion], Field(min_length=1, max_length=400)]
    model: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    safety_identifier: Any = None


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "predicate"
    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True):
    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`confidence` is the probability of the choice among all possible tokens."""

    type: str = "choice"
    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class LevelProbability(msgspec.Struct, frozen=True):
    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is the expected level; `confidence` as for choices, of the likeliest level."""

    type: str = "score"
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Any]
    usage: DecisionUsage
    warnings: list[str] | UnsetType = UNSET
