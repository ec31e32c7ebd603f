from __future__ import annotations

import argparse

import pytest

from octavo.cli.flags import units


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("2048", 2048), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1024**2)]
)
def test_counts(text: str, expected: int) -> None:
    assert units.count(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "8kb", "", "many"])
def test_wrong_counts_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number"):
        units.count(text)


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
    assert units.size(text) == expected


@pytest.mark.parametrize("text", ["0", "-5", "G", "1X", "12 monkeys"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        units.size(text)


@pytest.mark.parametrize(("text", "expected"), [("auto", None), ("-1", None), ("8k", 8000)])
def test_context_length(text: str, expected: int | None) -> None:
    assert units.context_length(text) == expected


def test_a_wrong_context_length_is_told_what_else_there_is() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'most' is not a whole number .*, or auto"):
        units.context_length("most")


@pytest.mark.parametrize("text", ["", " "])
def test_a_word_is_not_empty(text: str) -> None:
    assert units.word("key") == "key"
    with pytest.raises(argparse.ArgumentTypeError, match="empty"):
        units.word(text)


@pytest.mark.parametrize("text", ["0", "1.01", "-0.5", "nan", "most"])
def test_wrong_fractions_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a fraction"):
        units.fraction(text)


@pytest.mark.parametrize("text", ["65536", "-1", "http"])
def test_wrong_ports_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a port"):
        units.port(text)


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "soon"])
def test_wrong_seconds_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of seconds"):
        units.seconds(text)


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 1024**4, "5120.0 GiB")]
)
def test_bytes_are_shown(value: int, shown: str) -> None:
    assert units.show_bytes(value) == shown
