"""Recorded decoding on machines that can't record."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from octavo.worker.resident import graphs
from octavo.worker.resident.graphs import DecodeGraphs
from octavo.worker.resident.runner import ResidentRunner
from octavo.worker.worker import Worker


class Unrecorded(DecodeGraphs):
    """Graphs that compute anew what they would replay, and count how often."""

    replayed: dict[str, int]

    def capture(self, max_rows: int, loaded: Collection[int] = ()) -> None:
        self._reserve(max_rows)
        for size in self._sizes:
            self._graphs[size] = graphs._Size(Again(self, "forward", size), Again(self, "sample", size))  # type: ignore[arg-type]


class Again:
    def __init__(self, owner: Unrecorded, what: str, size: int) -> None:
        self._owner, self._what, self._size = owner, what, size

    def replay(self) -> None:
        Unrecorded.replayed[self._what] += 1
        getattr(self._owner, f"_{self._what}")(self._size)


def unrecorded_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Have resident runners made with such graphs from now on; counts what they replay."""
    make = Worker.make_runner

    def recorded(self: Worker, **settings: Any) -> Any:
        runner = make(self, **settings)
        if isinstance(runner, ResidentRunner):
            runner.capture(settings["num_slots"])
        return runner

    Unrecorded.replayed = {"forward": 0, "sample": 0}
    monkeypatch.setattr(Worker, "make_runner", recorded)
    monkeypatch.setattr("octavo.worker.resident.runner.DecodeGraphs", Unrecorded)
    return Unrecorded.replayed
