"""Reading values as people write them: `8k`, `512MiB`, `2G`, JSON."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmKM]?)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?[bB])?")
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000_000, "K": 1024, "M": 1024**2}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def count_or_all(text: str) -> int:
    """A count, or -1 for all.

    Raises:
        argparse.ArgumentTypeError: the text is neither.
    """
    return -1 if text.strip() == "-1" else count(text)


def count(text: str) -> int:
    """A count of things, at least 1: `2048`, `8k` (8,000), `8K` (8,192).

    Raises:
        argparse.ArgumentTypeError: the text is no such number.
    """
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _COUNT_UNITS[match[2]] if match else 0.0
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1, such as 2048, 8k or 8K")
    return int(value)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def context_length(text: str) -> int | None:
    """A count, or `auto` or `-1` for as much as the model has and the memory holds (None)."""
    return None if text.strip().lower() in ("auto", "-1") else count(text)


def size(text: str) -> int:
    """Bytes: `1073741824`, `512MiB`, `2GB` (powers of 1,000), `2G` and `2GiB` (powers of 1,024).

    Raises:
        argparse.ArgumentTypeError: the text is no such size.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 512MiB, 2G or 1073741824")
    decimal = (match[3] or "").lower() == "b"
    return int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()])


def fraction(text: str) -> float:
    """A number over 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction over 0 and up to 1, such as 0.9")
    return value


def seconds(text: str) -> float:
    """A number of seconds, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, such as 30 or 0.5")
    return value


def port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return int(text)


def show_bytes(value: float) -> str:
    """`123.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def json_object(text: str) -> dict[str, Any]:
    """`{"name": value}`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"name": true}}')
    return value
