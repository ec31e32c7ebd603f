"""The errors that Octavo raises on purpose. Any other exception that reaches a user is a bug."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OctavoError(Exception):
    """Base of all deliberate errors. The text states the problem and the remedy."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that can't be served as it is (HTTP 400).

    Attributes:
        message: the text without field and value.
        param: the field at fault; None if no single field is.
        value: the field's value, if useful. `str` adds field and value in the form that existing clients parse.
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
    """No usable model has this name or path; the text gives the way to get the model."""


class ModelFileError(OctavoError):
    """A model file that is corrupt, truncated or incomplete; the text names the file and the tensor or field."""


class ConfigError(OctavoError):
    """Settings that can't work together or on this machine; the text gives the numbers and the remedy."""


class SelfCheckError(OctavoError):
    """Kernels multiply wrongly with a layer's weights; the text names the layer, the deviation and the remedy."""


class EngineDeadError(OctavoError):
    """The engine core has stopped and can't generate any more (HTTP 503)."""


class DeviceLostError(EngineDeadError):
    """The device, or its process, can't compute any more; only a new engine process can use it (HTTP 503)."""

    def __init__(self, device: str, reason: str, log_lines: Sequence[str] = ()) -> None:
        """
        Args:
            device: its name, such as "NVIDIA H200 (cuda:0)".
            reason: what happened, without a final full stop.
            log_lines: last log lines of a process that has ended; shown in tracebacks only.
        """
        self.reason = reason
        if log_lines:
            self.add_note("\n".join(["Its last log lines:", *log_lines]))
        super().__init__(
            f"The device was lost: {device}: {reason}. Every request ends with this error and the engine stops; start "
            "it again. If it happens again, its log shows the step that failed."
        )


class EngineStateError(OctavoError):
    """The operation needs another state of the engine, such as awake (HTTP 409)."""


class QueueFullError(OctavoError):
    """The engine refuses new work because its queue is full (HTTP 429, with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowReaderError(OctavoError):
    """A request was ended because its output was not read (HTTP 408)."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The request was ended because its output was read too slowly: more than {limit:,} tokens were unread, "
            "the server's limit (--max-unread-tokens). Read faster, or request fewer tokens at once."
        )


def context_error(
    max_model_len: int, num_prompt: int | str, max_tokens: int | None = None, *, field: str = "messages"
) -> str:
    """Return the error text for an exceeded context, with the counts, as clients of the OpenAI API parse it.

    Args:
        max_model_len: tokens of the context.
        num_prompt: tokens of the prompt, or a text such as "at least 9000" if not all were counted.
        max_tokens: requested tokens; None if the prompt alone is too long.
        field: source of the prompt: "messages", "prompt" or "input".
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


def id_in_use(request_id: str) -> InvalidRequestError:
    """Return the error of a request whose id is in use by another running request."""
    return InvalidRequestError("request_id is in use by a running request.", param="request_id", value=request_id)


def internal_error(error: Exception) -> str:
    """Return the error text of a request that ended because of a bug. It has internal details: don't show it to
    clients."""
    return f"{_INTERNAL}{type(error).__name__}: {error}"


def is_internal(text: str) -> bool:
    """Return whether a text is from `internal_error`; all other error texts may be shown to clients."""
    return text.startswith(_INTERNAL)


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
