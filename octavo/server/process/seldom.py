"""`Seldom`: log lines that clients can cause as often as they like."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_EVERY_S = 60.0


class Seldom:
    """Writes at most one line a minute of each kind, so that nobody can fill the disk by what is the clients' fault."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, text: str, *args: object) -> None:
        """`text` is the kind; it is written with `args` and, if some were left out since the last one, their number."""
        now = self._clock()
        if now - self._said.get(text, -_EVERY_S) < _EVERY_S:
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return
        self._said[text] = now
        left_out = self._left_out.pop(text, 0)
        more = f" (And {left_out:,} more like this before.)" if left_out else ""
        self._logger.warning(text + more, *args)
