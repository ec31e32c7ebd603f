"""Parsers of settings that are neither numbers nor sizes (for those see `quantities`). All raise ValueError."""

from __future__ import annotations

import json
import re
from typing import Any

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
"""What browsers send as `Origin`: scheme, host and port in lower case, without a path. It is compared as a text."""
_HEADER = re.compile(r"header:[A-Za-z0-9!#$%&'*+.^_`|~-]+")
LONGEST_TENANT = 128


def word(text: str) -> str:
    """Return a text; refuse an empty one, such as an unset shell variable."""
    if not text.strip():
        raise ValueError("the text is empty; give one, or leave the flag out")
    return text


def dtype(text: str) -> str:
    """Return the name of a dtype for one of its names."""
    return {"float": "float32", "half": "float16"}.get(text, text)


def tenant_name(text: str) -> str:
    """Return the name of a tenant."""
    if not 0 < len(text) <= LONGEST_TENANT or not text.isprintable():
        raise ValueError(f"the name of a tenant has 1 to {LONGEST_TENANT} printable characters, got {text[:80]!r}")
    return text


def tenant_by(text: str) -> str:
    """Return what names a request's tenant."""
    if text in ("api-key", "user") or _HEADER.fullmatch(text):
        return text
    raise ValueError(f"{text!r} is not what names a tenant: give api-key, user, or header:NAME")


def method(text: str) -> str | None:
    """Return the name of a method of quantization; None for the words that mean none."""
    return None if text.lower() in ("none", "auto") else text


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def paths(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of paths, such as `/health,/metrics`."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for path in found:
        if not path.startswith("/"):
            raise ValueError(f"{path!r} is not a path, such as /health")
    return found


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object such as {{"name": true}}')
    return value


def item_or_list(text: str) -> list[str]:
    """Parse one value, or a JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{text!r} is neither a value nor a JSON list of strings")
    return items


def origins(text: str) -> list[str]:
    """Parse one origin, or a JSON list of them."""
    found = item_or_list(text)
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin, such as https://example.com (in lower case), or *")
    return found


def flat(items: list[list[str]]) -> tuple[str, ...]:
    """Join the lists that `item_or_list` returned."""
    return tuple(item for part in items for item in part)
