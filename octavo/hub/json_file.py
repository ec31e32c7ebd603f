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
    try:
        content = json.loads(path.read_bytes())
    except OSError as exc:
        raise ModelFileError(f"{path} can't be read: {exc.strerror or exc}.") from exc
    except ValueError as exc:
        raise ModelFileError(f"{path} is not valid JSON: {exc}. Download or repair the file.") from exc
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds a JSON {type(content).__name__} where an object is expected.")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Like `read_json`, but return {} if the file does not exist."""
    return read_json(path) if path.is_file() else {}
