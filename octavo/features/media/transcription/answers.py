"""Response bodies and events. A field that is UNSET is left out of the JSON."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class InputTokens(msgspec.Struct, frozen=True):
    audio_tokens: int
    text_tokens: int


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokens


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Whole seconds, rounded up."""

    type: Literal["duration"] = "duration"
    seconds: int


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format: json`."""

    text: str
    usage: TokenUsage | UnsetType = UNSET


class VerboseTranscription(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format: verbose_json`, without segments: their times are unknown."""

    task: str
    language: str | None
    duration: float
    text: str
    usage: DurationUsage


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDone(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokenUsage
