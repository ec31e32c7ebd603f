"""How a process logs."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What each process of an engine or a server is told of its log.

    Attributes:
        level: of what goes to standard error: debug, info, warning, error or critical.
        tables: for `logging.config.dictConfig`, in place of that; loggers that exist already go on unless it says so.
        source: where those are from, for errors.
        configure: whether to set up anything.
    """

    level: str = "warning"
    tables: Mapping[str, Any] | None = None
    source: str = ""
    configure: bool = True

    def set_up(self, form: str) -> None:
        """Log from now on; lines to standard error have this `form`.

        Raises:
            ConfigError: the tables are none that logging can use.
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
