"""Logging of a process."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of the lines of processes without a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Log settings of each process of an engine or a server.

    Attributes:
        level: of lines on standard error: debug, info, warning, error or critical.
        tables: configuration for `logging.config.dictConfig`, in place of `level`. Existing loggers stay enabled unless
            it disables them.
        source: origin of `tables`, for errors.
        configure: whether to configure logging at all.
    """

    level: str = "warning"
    tables: Mapping[str, Any] | None = None
    source: str = ""
    configure: bool = True

    def set_up(self, form: str) -> None:
        """Configure logging of this process.

        Args:
            form: format of lines on standard error.

        Raises:
            ConfigError: `tables` is not a valid configuration.
        """
        if not self.configure:
            return
        if self.tables is None:
            logging.basicConfig(level=self.level.upper(), format=form)
            return
        try:
            logging.config.dictConfig({"disable_existing_loggers": False, **self.tables})
        except (ValueError, TypeError, AttributeError, ImportError) as exc:
            reasons = [str(error) for error in (exc, exc.__cause__) if error is not None]
            raise ConfigError(f"{self.source}: {': '.join(reasons)}.") from exc
