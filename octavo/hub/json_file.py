"""JSON files of a checkpoint. Errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelFileError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelFileError: not readable, not JSON, or not an object.
    """
    return parse_json(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return a file's content. Raises ModelFileError if it is not readable."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ModelFileError(f"{path} can't be read: {exc.strerror or exc}.") from exc


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Return the object in the content of a JSON file. Raises ModelFileError if it is no JSON, or no object."""
    try:
        content = json.loads(text)
    except ValueError as exc:
        raise ModelFileError(f"{path} is not valid JSON: {exc}. Download or repair the file.") from exc
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds a JSON {type(content).__name__} where an object is expected.")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but return {} if the file does not exist."""
    return read_json(path) if path.is_file() else {}
