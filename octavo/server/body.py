"""Parsing of request bodies to validated pydantic models, with specific errors."""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from octavo.core.errors import InvalidRequestError
from octavo.server.admission import client_priority
from octavo.server.errors import ApiError
from octavo.server.validation import explain

MAX_DEPTH = 64
_LARGE = 1 << 20
"""Bytes of a body that is parsed in a thread: 18 MB of 500,000 messages take two seconds."""
PRIORITY = "X-Vllm-Priority"
"""Header with the priority, for proxies."""
_SHORTEST_PAIR = 12
"""Bytes of an escaped surrogate pair. The parser reports the text as truncated if fewer follow the first half."""
_INVALID_TEXT = "Invalid UTF-8 encoded string"
"""msgspec's words; before 0.23 it raises UnicodeDecodeError instead, as all its decoders do."""
_LONE_SURROGATE = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u])")
_WHOLE = re.compile(r"-?[0-9]{1,18}")

M = TypeVar("M", bound=BaseModel)


async def parse_body(request: Request, model: type[M], max_bytes: int, *, any_type: bool = False) -> M:
    """Parse the body as `model`. If it has no `priority`, the header's is used.

    Args:
        any_type: parse it as JSON, whatever its content type is.

    Raises:
        ApiError: 413 for a body over `max_bytes`, 415 for a content type other than JSON or a compressed body, 400 for
            malformed JSON.
        InvalidRequestError: a field is missing, unknown, of the wrong type or out of range.
    """
    check_content_type(request, any_type=any_type)
    data = await read_body(request, max_bytes)
    if len(data) < _LARGE:
        return _parsed(data, request, model)
    return await asyncio.to_thread(_parsed, data, request, model)


def _parsed(data: bytes, request: Request, model: type[M]) -> M:
    value = decode_json(data)
    if "priority" in model.model_fields and value.get("priority") is None:
        value["priority"] = _priority_of(request)
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise explain(exc) from None


def _priority_of(request: Request) -> int | None:
    given = request.headers.get(PRIORITY, "").strip()
    if given and not _WHOLE.fullmatch(given):
        raise InvalidRequestError(
            f"The header {PRIORITY} must be a whole number, got {given[:40]!r}.", param=PRIORITY, value=given
        )
    return client_priority(int(given), PRIORITY) if given else None


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. One that is too long is refused early, by its stated length if there is one."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(f"{int(declared[:18]):,} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(f"more than {max_bytes:,} bytes", max_bytes)
        parts.append(part)
    return b"".join(parts)


def decode_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. NaN, infinities and nesting deeper than `MAX_DEPTH` are refused.

    Raises:
        ApiError: 400, with the error and its position.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        raise ApiError(400, "The request body is empty; send a JSON object.")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        if isinstance(exc, UnicodeDecodeError) or str(exc) == _INVALID_TEXT:
            raise ApiError(400, "The request body is not valid UTF-8. Encode its text as UTF-8.") from None
        raise ApiError(400, f"The request body is not valid JSON: {_json_fault(exc, data)}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The request body must be a JSON object, got {_json_kind(value)}.")
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return
    raise _too_deep()


def check_content_type(request: Request, *, any_type: bool) -> None:
    """Raise ApiError (415) for a content type other than JSON, unless `any_type`, or a compressed body."""
    kind = "" if any_type else request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415, f"The content type must be application/json, got {kind}. Set 'Content-Type: application/json'."
        )
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415, f"Compressed bodies are not supported, got Content-Encoding: {coding}. Send the JSON uncompressed."
        )


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body has {size}, and this server takes at most {limit:,} bytes. "
        "Send less, or start the server with a larger --max-body-bytes.",
    )


def _too_deep() -> ApiError:
    return ApiError(400, f"The request body is nested too deeply: at most {MAX_DEPTH} levels are taken.")


def _json_fault(exc: msgspec.DecodeError, data: bytes) -> str:
    """Return a sentence with the error and its position."""
    what = str(exc).removeprefix("JSON is malformed: ")
    if "surrogate" in what or _LONE_SURROGATE.search(data[-_SHORTEST_PAIR:]):
        return (
            "a string has half of a surrogate pair, an escape such as \\ud83d without the other half, which is no "
            "character. Leave it out, or send the whole character; a text that was cut may have lost the other half."
        )
    if what == "Input data was truncated":
        return f"it ends after {len(data):,} bytes, before it is complete. Close all its strings, lists and objects."
    return f"{what}{_excerpt(what, data)}. Correct it; a JSON library writes it without such faults."


def _excerpt(what: str, data: bytes) -> str:
    """Return the bytes around the error, if the text `what` gives its position."""
    place = re.search(r"\(byte (\d+)\)", what)
    found = data[int(place[1]) :][:20].decode("utf-8", "replace") if place else ""
    return f", at {found!r}" if found else ""


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def require(condition: bool, param: str, value: Any, message: str) -> None:
    """Raise `InvalidRequestError` for `param` unless `condition` holds."""
    if not condition:
        raise InvalidRequestError(message, param=param, value=value)


def check_one_answer(n: int | None) -> None:
    """Refuse several choices on a route whose answers have none."""
    text = "n must be 1 here: the answer is a single message. Send the request several times, or to a chat completion."
    require(n in (None, 1), "n", n, text)


def check_count(limit: int, count: int, param: str) -> None:
    """Refuse more inputs than the server takes in one request."""
    text = f"{param} must have at most {limit} entries on this server (--max-inputs), got {count}."
    require(count <= limit, param, f"{count} entries", text)
