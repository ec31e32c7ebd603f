"""Objects of the user's own, which a setting names."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from octavo.core.errors import ConfigError


def imported(module: str, path: str, setting: str) -> Any:
    """What `path` ("Class", "Class.member") stands for in a module. `setting` begins the errors: flag and value.

    Raises:
        ConfigError: the module can't be imported, or has nothing of that name.
    """
    try:
        found: Any = importlib.import_module(module)
    except Exception as exc:  # whatever the module raises
        raise ConfigError(
            f"{setting}: the module {module} can't be imported: {type(exc).__name__}: {exc}. Install it, or put its "
            "folder into PYTHONPATH."
        ) from exc
    for part in path.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{setting}: {module} has no {path}.{hint}")
        found = getattr(found, part)
    return found
