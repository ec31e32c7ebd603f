from __future__ import annotations

import argparse

import pytest

from octavo.cli.flags import units
from octavo.core import parsing, quantities


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("2048", 2048), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1024**2)]
)
def test_counts(text: str, expected: int) -> None:
    assert quantities.count(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "8kb", "", "many"])
def test_wrong_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        quantities.count(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1073741824", 1024**3),
        ("512MiB", 512 * 1024**2),
        ("2G", 2 * 1024**3),
        ("2GiB", 2 * 1024**3),
        ("2GB", 2 * 1000**3),
        ("0.5g", 1024**3 // 2),
        ("100b", 100),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert quantities.size(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "G", "1X", "12 monkeys"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        quantities.size(text)


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("-1", None), ("8k", 8000)])
def test_context_length(text: str, expected: int | None) -> None:
    assert quantities.context_length(text) == expected


def test_a_wrong_context_length_is_told_what_else_there_is() -> None:
    with pytest.raises(ValueError, match=r"'most' is not a whole number .*, or auto"):
        quantities.context_length("most")


@pytest.mark.parametrize("text", ["", " "])
def test_a_word_is_not_empty(text: str) -> None:
    assert parsing.word("key") == "key"
    with pytest.raises(ValueError, match="empty"):
        parsing.word(text)


@pytest.mark.parametrize("text", ["0", "1.01", "-0.5", "nan", "most"])
def test_wrong_fractions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a fraction"):
        quantities.fraction(text)


@pytest.mark.parametrize("text", ["65536", "-1", "http"])
def test_wrong_ports_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a port"):
        parsing.port(text)


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "soon"])
def test_wrong_seconds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of seconds"):
        quantities.seconds(text)


def test_argparse_reports_the_reason() -> None:
    assert units.count("8k") == 8000
    with pytest.raises(argparse.ArgumentTypeError, match="'x' is not a whole number of at least 1"):
        units.count("x")


@pytest.mark.parametrize("value", [1, 1000, 1024, 1536, 32 << 20, 1 << 30, 3 << 30, 2048 << 30])
def test_a_shown_size_is_read_as_the_same(value: int) -> None:
    assert quantities.size(quantities.show_size(value)) == value
    assert quantities.show_size(32 << 20) == "32MiB"


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 1024**4, "5120.0 GiB")]
)
def test_bytes_are_shown(value: int, shown: str) -> None:
    assert units.show_bytes(value) == shown
