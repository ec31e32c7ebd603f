"""Parsers of values as users write them on a command line: `8k`, `512MiB`, `2G`, JSON."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.core import quantities

T = TypeVar("T")


def _flag(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `read`: convert ValueError to the exception that argparse reports."""

    @functools.wraps(read)
    def wrapped(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return wrapped


count = _flag(quantities.count)
count_or_all = _flag(quantities.count_or_all)
natural = _flag(quantities.natural)
context_length = _flag(quantities.context_length)
size = _flag(quantities.size)
fraction = _flag(quantities.fraction)
share = _flag(quantities.share)
positive = _flag(quantities.positive)
seconds = _flag(quantities.seconds)
duration = _flag(quantities.duration)


def word(text: str) -> str:
    """Return a text; refuse an empty one, such as an unset shell variable."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the text is empty; give one, or leave the flag out")
    return text


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def paths(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of paths, such as `/health,/metrics`."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for path in found:
        if not path.startswith("/"):
            raise argparse.ArgumentTypeError(f"{path!r} is not a path, such as /health")
    return found


def show_bytes(value: float) -> str:
    """Format a number of bytes, as `123.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"name": true}}')
    return value
