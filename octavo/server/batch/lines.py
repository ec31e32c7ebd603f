"""The lines of a batch's input: `{"custom_id", "method": "POST", "url", "body"}`, one JSON object per line."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from octavo.server.validation import kind_of

_MAX_PROBLEMS = 100


class Line(msgspec.Struct, frozen=True):
    """One request."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Problem(msgspec.Struct, frozen=True):
    """An error in an input, in the form of OpenAI's API; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Input:
    """A valid input file. Lines are read on demand.

    Args:
        places: offset and length of each line, in bytes.
    """

    def __init__(self, path: Path, places: list[tuple[int, int]]) -> None:
        self._path = path
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, number: int) -> Line:
        """Return line `number`, from 0."""
        start, size = self._places[number]
        with self._path.open("rb") as file:
            file.seek(start)
            return msgspec.json.decode(file.read(size), type=Line)


def scan(path: Path, urls: Collection[str], *, max_lines: int, max_line_bytes: int) -> Input | list[Problem]:
    """Check every line. Return the input, or its errors (at most the first hundred). Empty lines are skipped.

    Args:
        urls: the allowed values of `url`.
    """
    places: list[tuple[int, int]] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for number, start, data in _lines(path, max_line_bytes):
        problem = _check(data, urls, seen, max_line_bytes)
        if problem is None and len(places) == max_lines:
            problem = Problem("too_many_lines", f"The file has more than {max_lines:,} requests; split it.")
        if problem is None:
            places.append((start, len(data)))
            continue
        problems.append(msgspec.structs.replace(problem, line=number))
        if len(problems) == _MAX_PROBLEMS or problem.code == "too_many_lines":
            break
    if not places and not problems:
        problems.append(Problem("empty_file", "The file has no requests; write one JSON object per line."))
    return problems or Input(path, places)


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset, content) of each non-empty line; of a line that is too long only the beginning.

    A byte order mark at the beginning, as written by programs on Windows, is skipped (RFC 8259, 8.1).
    """
    with path.open("rb") as file:
        number = 0
        start = file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        while data := file.readline(max_bytes + 2):
            number, place = number + 1, start
            start += len(data)
            if data.strip():
                yield number, place, data
            while not data.endswith(b"\n") and (data := file.readline(max_bytes)):
                start += len(data)


def _check(data: bytes, urls: Collection[str], seen: set[str], max_bytes: int) -> Problem | None:
    if len(data.rstrip(b"\r\n")) > max_bytes:
        return Problem("line_too_long", f"A line may have at most {max_bytes:,} bytes (--max-body-bytes).")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return Problem("invalid_json_line", f"This line is not valid JSON: {exc}. Write one object per line.")
    if not isinstance(value, dict):
        return Problem("invalid_json_line", f"Each line must be a JSON object, not {kind_of(value)}.")
    return _check_fields(value, urls, seen)


def _check_fields(value: dict[str, Any], urls: Collection[str], seen: set[str]) -> Problem | None:
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if name not in value:
            return Problem("missing_required_parameter", f"{name} is required; add it to the line.", name)
        if not isinstance(value[name], kind):
            wanted = "a string" if kind is str else "an object"
            return Problem(f"invalid_{name}", f"{name} must be {wanted}, not {kind_of(value[name])}.", name)
    if value.get("method", "POST") != "POST":
        return Problem("invalid_method", f"method must be POST, got {value['method']!r}.", "method")
    if value["url"] not in urls:
        names = ", ".join(sorted(urls))
        return Problem("invalid_url", f"url must be {names} in this batch, got {value['url']!r}.", "url")
    if value["custom_id"] in seen:
        text = f"custom_id {value['custom_id']!r} is that of an earlier line; give each line its own."
        return Problem("duplicate_custom_id", text, "custom_id")
    seen.add(value["custom_id"])
    return None
