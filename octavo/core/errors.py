"""The errors that Octavo raises on purpose. Anything else that surfaces is a bug."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OctavoError(Exception):
    """Base of every deliberate error; its text says what is wrong and what to do about it."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that can't be served as it stands (HTTP 400).

    `param` names the offending field and `value` what it held, where that is worth repeating; both go into the message,
    in the form that clients of this ecosystem already look for.
    """

    def __init__(self, message: str, *, param: str | None = None, value: Any = None) -> None:
        self.message = message
        self.param = param
        self.value = value
        super().__init__(message)

    def __str__(self) -> str:
        if self.param is None:
            return self.message
        value = "" if self.value is None else f", value={_short(self.value)}"
        return f"{self.message} (parameter={self.param}{value})"


class UnsupportedError(InvalidRequestError):
    """A known option that this model or this version does not support (HTTP 400)."""


class ModelNotFoundError(OctavoError):
    """A model name or path that leads to nothing usable; the text says how to get the model."""


class ModelFileError(OctavoError):
    """A model file that is corrupt, truncated or incomplete; the text names the file and the tensor or field."""


class ConfigError(OctavoError):
    """Settings that can't work together or on this machine; the text gives the numbers and the way out."""


class EngineDeadError(OctavoError):
    """The engine core has stopped; nothing further can be generated (HTTP 503)."""


class DeviceLostError(EngineDeadError):
    """The device, or a process that drives one, can compute nothing more; only a new engine can use it (HTTP 503)."""

    def __init__(self, device: str, reason: str, log_lines: Sequence[str] = ()) -> None:
        """
        Args:
            device: its name, as in "NVIDIA H200 (cuda:0)".
            reason: what happened to it, without a final full stop.
            log_lines: the last ones of the process that is gone; a traceback shows them, the message does not.
        """
        self.reason = reason
        if log_lines:
            self.add_note("\n".join(["It last logged:", *log_lines]))
        super().__init__(
            f"The device was lost: {device}: {reason}. Every request ends with this error and the engine stops; start "
            "it again. If it happens again, its log shows the step that failed."
        )


class EngineStateError(OctavoError):
    """The engine is not in the state that this takes, such as awake (HTTP 409)."""


class QueueFullError(OctavoError):
    """The engine refuses new work because its queue is full (HTTP 429, with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(OctavoError):
    """A request was ended because its output was not read (HTTP 408)."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request was ended because its output was read too slowly: more than {limit:,} tokens waited, the "
            "most that this server keeps (--max-unread-tokens). Read faster, or ask for less at once."
        )


def context_error(
    max_model_len: int, num_prompt: int | str, max_tokens: int | None = None, *, field: str = "messages"
) -> str:
    """The sentence about an exceeded context that clients of the OpenAI API look for, with the counts.

    Args:
        num_prompt: tokens of the prompt, or words such as "at least 9000" where they were not all counted.
        max_tokens: tokens asked for; None when the prompt alone is too long.
        field: where the prompt came from: "messages", "prompt" or "input".
    """
    limit = f"This model's maximum context length is {max_model_len} tokens. However,"
    if max_tokens is None or isinstance(num_prompt, str):
        what = field if field == "messages" else "input prompt"
        return f"{limit} your {field} resulted in {num_prompt} tokens. Please reduce the length of the {what}."
    return (
        f"{limit} you requested {num_prompt + max_tokens} tokens ({num_prompt} in the {field}, {max_tokens} in the "
        f"completion). Please reduce the length of the {field} or completion."
    )


_INTERNAL = "Internal error: "


def internal_error(error: Exception) -> str:
    """How a request that a fault of the engine's has ended tells of it: with its insides, so not to strangers."""
    return f"{_INTERNAL}{type(error).__name__}: {error}"


def is_internal(text: str) -> bool:
    """Whether `internal_error` wrote it; other reasons are sentences for whoever asked."""
    return text.startswith(_INTERNAL)


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
