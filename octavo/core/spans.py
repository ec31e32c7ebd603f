"""`Spans`: what ran when. Methods of living objects are watched from outside, so what is not watched pays nothing."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

About = Callable[..., dict[str, Any]]
"""Makes a span's arguments from those of the method that was called."""


class Span(NamedTuple):
    """From `began` to `ended` in nanoseconds of `time.monotonic_ns`. `row` is the line of the picture it belongs in."""

    name: str
    row: str
    began: int
    ended: int
    about: dict[str, Any]


class Label(NamedTuple):
    """What one operation of a series is called."""

    name: str
    about: dict[str, Any]


class Watched(NamedTuple):
    """A method to watch, the name of its spans, and what they tell."""

    owner: object
    method: str
    name: str
    about: About | None = None


class Spans:
    """Times are kept as they come, and made into `Span`s when they are read."""

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
        """Operations one behind the other: each begins where the one before has ended."""
        self._series.append((labels, row, began, ends))

    def watch(self, watched: Watched) -> None:
        """Note a span for every call of the method from now on, until `release`."""
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
        """Have an object's method be another function until `release`."""
        self._replaced.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, other)

    def at_release(self, do: Callable[[], None]) -> None:
        self._ending.append(do)

    def release(self) -> None:
        """Everything is as it was before it was watched; the spans stay."""
        for do in self._ending:
            do()
        while self._replaced:
            owner, method, before = self._replaced.pop()
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
