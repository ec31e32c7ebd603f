"""How long work reports itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then, from the thread that does the work.

    `phase` is a short text for people ("downloading smollm2"); `done` and `total` are bytes, `total` 0 if unknown. The
    last call of a phase has `done == total`.
    """

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def silent(phase: str, done: int, total: int) -> None:
    """A `Progress` that reports to nobody."""
