"""Formats of tool calls that a user declares in a Python file."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.text.tools.formats import FORMATS, ToolFormat


def load_formats(file: str) -> Mapping[str, ToolFormat]:
    """Return name -> format for every `ToolFormat` bound at module level of the file.

    Raises:
        ConfigError: the file can't be run, declares no format, or an invalid one; the text names the problem.
    """
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location("octavo_tool_parser_plugin", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--tool-parser-plugin {file}: give an existing Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as exc:  # any exception of the user's code
        raise ConfigError(f"--tool-parser-plugin {file} fails: {type(exc).__name__}: {exc}") from exc
    found = {one.name: one for one in vars(module).values() if isinstance(one, ToolFormat)}
    own = {name: one for name, one in found.items() if FORMATS.get(name) is not one}  # it may import those to vary them
    if not own:
        raise ConfigError(
            f"--tool-parser-plugin {file} declares no format: it must hold ToolFormat objects of "
            "octavo.text.tools.formats (docs/tools-and-reasoning.md). Parsers for other servers can't be used."
        )
    for one in own.values():
        _check(one, file)
    return own


def _check(one: ToolFormat, file: str) -> None:
    problem = ""
    if one.name in FORMATS:
        problem = "its name is that of a built-in format; choose another"
    elif not one.call_open or not one.name_end or not one.call_close:
        problem = "call_open, name_close and call_close must not be empty"
    elif not one.opening.startswith(one.trigger):
        problem = f"its trigger {one.trigger!r} is not a prefix of {one.opening!r}"
    if problem:
        raise ConfigError(f"--tool-parser-plugin {file}: the format {one.name!r} is invalid: {problem}.")
