"""Logging setup of the server's processes, and filtered lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.log import LogSettings

_ACCESS = "uvicorn.access"


def log_to(config: ServerConfig, who: str = "") -> None:
    """Set up this process's log; `who` names it if there are several.

    Raises:
        ConfigError: the settings contradict each other, or their file is invalid.
    """
    log_settings(config).set_up(f"%(asctime)s %(levelname)s {f'[{who}] ' if who else ''}%(message)s")


def log_settings(config: ServerConfig) -> LogSettings:
    """Return the log settings for any of the server's processes.

    Raises:
        ConfigError: the file is not a JSON object, or is given with --no-configure-logging.
    """
    if config.log_config_file is None:
        return LogSettings(level=config.log_level, configure=config.configure_logging)
    source = f"--log-config-file {config.log_config_file}"
    if not config.configure_logging:
        raise ConfigError(f"{source} is not read with --no-configure-logging; leave one of them out.")
    try:
        tables = json.loads(Path(config.log_config_file).expanduser().read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{source} can't be read: {exc.strerror or exc}.") from exc
    except ValueError as exc:
        raise ConfigError(f"{source} is not valid JSON: {exc}.") from exc
    if not isinstance(tables, dict):
        raise ConfigError(f"{source} must hold a JSON object for logging.config.dictConfig.")
    return LogSettings(level=config.log_level, tables=tables, source=source)


def uvicorn_log(config: ServerConfig) -> dict[str, Any]:
    """Return uvicorn's log settings, with a line per HTTP request at level debug or if a file enables it."""
    tables = log_settings(config).tables
    wanted = config.log_level == "debug" if tables is None else _ACCESS in tables.get("loggers", {})
    own = tables is None and config.configure_logging
    return {
        "log_config": None,
        "log_level": ("warning" if config.log_level == "info" else config.log_level) if own else None,
        "access_log": wanted and not config.disable_uvicorn_access_log,
    }


@contextmanager
def silent_access(paths: Sequence[str]) -> Iterator[None]:
    """For the time of the block, don't log HTTP requests to these paths."""

    def speaks(record: logging.LogRecord) -> bool:
        args: Any = record.args
        return not (isinstance(args, tuple) and len(args) > 2 and str(args[2]).partition("?")[0] in paths)

    access = logging.getLogger(_ACCESS)
    access.addFilter(speaks)
    try:
        yield
    finally:
        access.removeFilter(speaks)
