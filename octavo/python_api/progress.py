"""Progress of a call of `LLM`: a bar on standard error, or the caller's own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

UseTqdm = bool | Callable[..., Any] | None
"""Whether to show a bar; None shows it if standard error is a terminal. Or a factory: `tqdm`, or a callable like it."""


class Bar(Protocol):
    """The methods used of a bar, with tqdm's names."""

    def update(self, n: int, /) -> Any: ...

    def close(self) -> Any: ...


class PromptProgress:
    """Counts completed prompts and updates a bar. A context manager that always closes the bar."""

    def __init__(self, bar: Bar | None) -> None:
        self._bar = bar
        self._note = getattr(bar, "set_postfix_str", None)
        self._began = time.perf_counter()
        self._read = self._written = 0

    def took(self, prompt_tokens: int, output_tokens: int) -> None:
        """Count one completed prompt."""
        if self._bar is None:
            return
        self._read += prompt_tokens
        self._written += output_tokens
        seconds = max(time.perf_counter() - self._began, 1e-9)
        if self._note is not None:
            self._note(f"tokens/s: {self._read / seconds:.0f} of prompts, {self._written / seconds:.0f} of outputs")
        self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def open_progress(wanted: UseTqdm, total: int, description: str = "Processed prompts") -> PromptProgress:
    """Return progress over `total` prompts, shown as `wanted`."""
    if wanted is None:
        wanted = sys.stderr.isatty()
    if callable(wanted):
        return PromptProgress(wanted(total=total, desc=description))
    return PromptProgress(_RichBar(total, description) if wanted and total else None)


class _RichBar:
    """A bar on a terminal; otherwise one line at the end."""

    def __init__(self, total: int, description: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._task = self._bars.add_task(description, total=total, note="")
        self._bars.start()

    def update(self, n: int, /) -> None:
        self._bars.advance(self._task, n)

    def set_postfix_str(self, note: str) -> None:
        self._bars.update(self._task, note=note)

    def close(self) -> None:
        self._bars.stop()
