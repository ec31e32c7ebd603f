"""`Spans`: time spans of method calls, recorded by wrapping methods of live objects. Without a profile they cost
nothing."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

About = Callable[..., dict[str, Any]]
"""Returns a span's arguments, given those of the method call."""


class Span(NamedTuple):
    """From `began` to `ended`, in nanoseconds of `time.monotonic_ns`. `row` names the trace's row that shows it."""

    name: str
    row: str
    began: int
    ended: int
    about: dict[str, Any]


class Label(NamedTuple):
    """Name and arguments of one operation of a series."""

    name: str
    about: dict[str, Any]


class Watched(NamedTuple):
    """A method to watch, with the name and arguments of its spans."""

    owner: object
    method: str
    name: str
    about: About | None = None


class Spans:
    """Records times cheaply; converts them to `Span`s when they are read."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._series: list[tuple[Sequence[Label], str, int, array[int]]] = []
        self._ending: list[Callable[[], None]] = []
        self._replaced: list[tuple[object, str, Callable[..., Any] | None]] = []

    def __iter__(self) -> Iterator[Span]:
        yield from self._spans
        for labels, row, began, ends in self._series:
            for (name, about), ended in zip(labels, ends, strict=True):
                yield Span(name, row, began, ended, about)
                began = ended

    def add(self, span: Span) -> None:
        self._spans.append(span)

    def add_series(self, labels: Sequence[Label], row: str, began: int, ends: array[int]) -> None:
        """Add consecutive operations: each begins when the previous one has ended.

        Args:
            began: start of the first, in nanoseconds of `time.monotonic_ns`.
            ends: end of each, likewise.
        """
        self._series.append((labels, row, began, ends))

    def watch(self, watched: Watched) -> None:
        """Record a span for every call of the method until `release`."""
        inner = getattr(watched.owner, watched.method)
        name, about = watched.name, watched.about

        def noted(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                told = about(*args, **kwargs) if about else {}
                self._spans.append(Span(name, "steps", began, time.monotonic_ns(), told))

        self.replace(watched.owner, watched.method, noted)

    def replace(self, owner: object, method: str, other: Callable[..., Any]) -> None:
        """Replace an object's method by another function until `release`."""
        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, other)

    def at_release(self, do: Callable[[], None]) -> None:
        self._ending.append(do)

    def release(self) -> None:
        """Restore all replaced methods; keep the spans."""
        for do in self._ending:
            do()
        while self._replaced:
            owner, method, before = self._replaced.pop()
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
