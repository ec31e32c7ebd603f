"""The phases of an engine core's start, and their callback."""

from __future__ import annotations

import time
from collections.abc import Callable

OnPhase = Callable[[str, float | None], None]
"""Called with a phase's name and None when it begins, and with its duration in seconds when it ends."""


class PhaseTimer:
    """Times the phases of a start, one after the other, and reports each to `on_phase`."""

    def __init__(self, on_phase: OnPhase) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase
        self._name = ""
        self._began = 0.0

    def begin(self, name: str) -> None:
        """End the previous phase, if any, and begin this one."""
        self.end()
        self._name, self._began = name, time.perf_counter()
        self._on_phase(name, None)

    def end(self) -> None:
        if self._name:
            self.seconds[self._name] = round(time.perf_counter() - self._began, 3)
            self._on_phase(self._name, self.seconds[self._name])
            self._name = ""
