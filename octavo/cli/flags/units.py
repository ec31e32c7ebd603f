"""Parsers of numbers for argparse, and the form in which numbers of bytes are shown."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TypeVar

from octavo.core import parsing, quantities

T = TypeVar("T")


def reader(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `read`: convert ValueError to the exception that argparse reports."""

    @functools.wraps(read)
    def wrapped(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return wrapped


count = reader(quantities.count)
natural = reader(quantities.natural)
seconds = reader(quantities.seconds)
positive = reader(quantities.positive)
port = reader(parsing.port)


def show_bytes(value: float) -> str:
    """Format a number of bytes, as `123.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
