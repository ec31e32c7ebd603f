"""Progress on standard error: bars on a terminal, else one line per phase."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from octavo.core.terminal import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Display(Protocol):
    """Shows downloads (`octavo.hub.progress.Progress`) and phases of an engine's start (`OnPhase`)."""

    def download(self, phase: str, done: int, total: int) -> None: ...

    def phase(self, name: str, seconds: float | None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_display() -> Display:
    """Return the display that suits standard error. It draws while it is entered."""
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


class BarDisplay:
    """A bar for each download and a spinner for each phase; both disappear at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
        from rich.progress import Progress as Bars
        from rich.text import Text

        class Amount(ProgressColumn):
            def render(self, task: Task) -> Text:
                if not task.total:
                    return Text(f"{task.elapsed or 0:.0f} s")
                speed = f"  {task.speed / 1e6:.0f} MB/s" if task.speed else ""
                return Text(f"{task.completed / 1e6:.0f} of {task.total / 1e6:.0f} MB{speed}")

        columns = (TextColumn("{task.description}"), BarColumn(), Amount())
        self._bars: Bars = Bars(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}

    def download(self, phase: str, done: int, total: int) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total or None)
        self._bars.update(self._tasks[phase], completed=done, total=total or None)

    def phase(self, name: str, seconds: float | None) -> None:
        if seconds is None:
            self._tasks[name] = self._bars.add_task(name, total=None)
        elif name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


class LineDisplay:
    """One line at the start of a download. Phases are not shown; they are summarized at the end."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def download(self, phase: str, done: int, total: int) -> None:
        if phase not in self._seen:
            self._seen.add(phase)
            say(f"{phase} ({total / 1e6:.0f} MB)" if total else phase)

    def phase(self, name: str, seconds: float | None) -> None:
        """Ignore phases."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to clean up."""
