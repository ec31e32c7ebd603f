"""Progress of what takes long, on the terminal: bars where one is attached, else a line for each phase."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from octavo.cli.parser import say
from octavo.hub.progress import Progress


@contextlib.contextmanager
def download_bar() -> Iterator[Progress]:
    """A `Progress` that draws on standard error while the block runs."""
    if not sys.stderr.isatty():
        yield PhaseLines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield PhaseBars(bars)


class PhaseBars:
    """One bar a phase."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total or None)
        self._bars.update(self._tasks[phase], completed=done, total=total or None)


class PhaseLines:
    """One line when a phase begins."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase not in self._seen:
            self._seen.add(phase)
            say(f"{phase} ({total / 1e6:.0f} MB)" if total else phase)
