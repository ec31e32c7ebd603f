"""Import user-defined objects that a setting names."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from octavo.core.errors import ConfigError


def imported(module: str, path: str, setting: str) -> Any:
    """Import a module and return one of its objects.

    Args:
        module: dotted name.
        path: name in the module: "Class" or "Class.member".
        setting: flag and value, the start of error texts.

    Raises:
        ConfigError: the module can't be imported, or has no such object.
    """
    try:
        found: Any = importlib.import_module(module)
    except Exception as exc:  # the module may raise anything
        raise ConfigError(
            f"{setting}: the module {module} can't be imported: {type(exc).__name__}: {exc}. Install it, or add its "
            "folder to PYTHONPATH."
        ) from exc
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{setting}: {module} has no {path}.{hint}")
        found = getattr(found, part)
    return found
