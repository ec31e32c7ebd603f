"""`Seldom`: rate-limited log lines for events that clients can cause at will."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 60.0


class Seldom:
    """Writes at most one line a minute of each kind, so that clients can't fill the disk."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, text: str, *args: object) -> None:
        """Log `text`, the kind, with `args` and the number of lines suppressed since the last one."""
        now = self._clock()
        if now - self._said.get(text, -_EVERY_S) < _EVERY_S:
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._said[text] = now
        left_out = self._left_out.pop(text, 0)
        more = f" (And {left_out:,} more like this before.)" if left_out else ""
        self._logger.warning(text + more, *args)
