"""The form of a request: multipart/form-data, as OpenAI has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidRequestError, UnsupportedError

FORMATS = ("json", "text", "verbose_json")
_TIMED = ("srt", "vtt", "diarized_json")
_NUMBERS = (
    "seed",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "max_completion_tokens",
)
"""Fields of chat completions that are taken, too, as other engines do."""
_TIMES = ("timestamp_granularities", "timestamp_granularities[]")
_KNOWN = {"model", "language", "prompt", "response_format", "temperature", "stream", *_NUMBERS}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Form:
    """What is asked for, besides the file.

    Attributes:
        sampling: fields of a chat completion. Without a temperature it is 0.
    """

    model: str | None
    language: str | None
    prompt: str | None
    format: str
    streamed: bool
    sampling: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Form:
        """Read the fields.

        Raises:
            InvalidRequestError: one is unknown, not supported or malformed.
        """
        given = {name: value for name, value in fields.items() if value != ""}
        if timed := next((name for name in _TIMES if name in given), None):
            raise UnsupportedError(
                f"{timed} is not supported: this model gives no timestamps. Leave it out.", param=timed
            )
        odd = next((name for name in given if name not in _KNOWN), None)
        if odd is not None:
            raise UnsupportedError(
                f"{odd} is not supported. The fields are file, {', '.join(sorted(_KNOWN))}.", param=odd
            )
        shape = given.get("response_format", "json")
        if shape in _TIMED:
            raise UnsupportedError(
                f"response_format {shape} needs timestamps, which this model does not give. Ask for "
                f"{', '.join(FORMATS)}.",
                param="response_format",
                value=shape,
            )
        if shape not in FORMATS:
            raise InvalidRequestError(
                f"response_format must be one of {', '.join(FORMATS)}, got {shape!r}.",
                param="response_format",
                value=shape,
            )
        streamed = _BOOLEANS.get(given.get("stream", "false").lower())
        if streamed is None:
            raise InvalidRequestError(f"stream must be true or false, got {given['stream']!r}.", param="stream")
        if streamed and shape != "json":
            raise UnsupportedError(
                f"stream can't be combined with response_format {shape}: events are JSON. Leave one of them out.",
                param="stream",
            )
        numbers = {name: _number(name, given[name]) for name in ("temperature", *_NUMBERS) if name in given}
        return cls(
            model=given.get("model"),
            language=given.get("language"),
            prompt=given.get("prompt"),
            format=shape,
            streamed=streamed,
            sampling={"temperature": 0.0} | numbers,
        )


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    raise InvalidRequestError(f"{name} must be a number, got {text!r}.", param=name, value=text)


def schema() -> dict[str, Any]:
    """Return the form for the OpenAPI document."""
    numbers = {name: {"type": "number"} for name in ("temperature", *_NUMBERS)}
    texts = {name: {"type": "string"} for name in ("model", "language", "prompt")}
    return {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary"},
            **texts,
            "response_format": {"type": "string", "enum": list(FORMATS)},
            "stream": {"type": "boolean"},
            **numbers,
        },
        "required": ["file"],
    }
