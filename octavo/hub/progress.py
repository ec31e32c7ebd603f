"""The callback type for progress reports."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called periodically, in the thread that does the work.

    `phase` is a short text for users ("downloading smollm2"). `done` and `total` are bytes; `total` is 0 if unknown.
    The last call of a phase has `done == total`.
    """

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def silent(phase: str, done: int, total: int) -> None:
    """A `Progress` that does nothing."""
