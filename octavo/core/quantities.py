"""Parse quantities such as `8k`, `512MiB` and `2G`, which all settings accept."""

from __future__ import annotations

import re
from collections.abc import Callable

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmKM]?)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?[bB])?")
_COUNT_UNITS = {"": 1, "k": 1000, "m": 1000_000, "K": 1024, "M": 1024**2}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
MOST_GIB = 1 << 20
"""A PiB."""


def count_or_all(text: str) -> int:
    """Parse a count, or -1 for all.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return -1 if text.strip() == "-1" else count(text)
    except ValueError as error:
        raise ValueError(f"{error}, or -1 for all") from None


def count(text: str) -> int:
    """Parse a count of at least 1: `2048`, `8k` (8,000), `8K` (8,192).

    Raises:
        ValueError: the text is not a count.
    """
    match = _COUNT.fullmatch(text.strip())
    value = float(match[1]) * _COUNT_UNITS[match[2]] if match else 0.0
    if value < 1 or value != int(value):
        raise ValueError(f"{text!r} is not a whole number of at least 1, such as 2048, 8k or 8K")
    return int(value)


def natural(text: str) -> int:
    """Parse a whole number of at least 0; raise ValueError for others."""
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def context_length(text: str) -> int | None:
    """Parse a count; `auto` and `-1` return None, for the longest context that model and memory allow."""
    try:
        return None if text.strip().lower() in ("auto", "-1") else count(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def size(text: str) -> int:
    """Parse a size in bytes: `1073741824`, `512MiB`, `2GB` (powers of 1,000), `2G` and `2GiB` (powers of 1,024).

    Raises:
        ValueError: the text is not a size.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size, such as 512MiB, 2G or 1073741824")
    decimal = (match[3] or "").lower() == "b"
    return int(float(match[1]) * (1000 if decimal else 1024) ** _POWERS[match[2].lower()])


def show_size(value: int) -> str:
    """Return bytes as `size` reads them, in the largest unit that divides them."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if value and value % (1 << power) == 0:
            return f"{value >> power}{unit}"
    return str(value)


def fraction(text: str) -> float:
    """Parse a number over 0 and up to 1; raise ValueError for others."""
    return _number(text, lambda value: 0 < value <= 1, "a fraction over 0 and up to 1, such as 0.9")


def share(text: str) -> float:
    """Parse a number from 0 to 1; raise ValueError for others."""
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1, such as 0.01")


def positive(text: str) -> float:
    """Parse a finite number over 0; raise ValueError for others."""
    return _number(text, lambda value: 0 < value < float("inf"), "a number over 0, such as 1000000 or 5e5")


def gibibytes(text: str) -> float:
    """Parse a number of GiB, from 0 to `MOST_GIB`; raise ValueError for others."""
    return _number(text, lambda value: 0 <= value <= MOST_GIB, f"a number of GiB up to {MOST_GIB}, such as 64 or 0.5")


def seconds(text: str) -> float:
    """Parse a finite number of seconds, at least 0; raise ValueError for others."""
    return _number(text, lambda value: 0 <= value < float("inf"), "a number of seconds, such as 30 or 0.5")


def duration(text: str) -> float:
    """Parse a finite number of seconds over 0; raise ValueError for others."""
    return _number(text, lambda value: 0 < value < float("inf"), "a number of seconds over 0, such as 30 or 0.5")


def _number(text: str, good: Callable[[float], bool], kind: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not good(value):
        raise ValueError(f"{text!r} is not {kind}")
    return value
