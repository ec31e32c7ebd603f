"""Recorded steps on machines that can't record."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from octavo.worker.resident import graphs
from octavo.worker.resident.graphs import DecodeGraphs
from octavo.worker.resident.mixed import MixedGraphs
from octavo.worker.resident.runner import ResidentRunner
from octavo.worker.worker import Worker

REPLAYED: dict[str, int] = {}


class Unrecorded(DecodeGraphs):
    """Graphs that compute anew what they would replay, and count how often."""

    def capture(self, max_rows: int, loaded: Collection[int] = (), *, shares: bool = True) -> None:
        self._reserve(max_rows, shares)
        for size in self._sizes:
            forward = Again(self, "_forward", "forward", size)
            sample = Again(self, "_sample", "sample", size)
            sharing = Again(self, "_sharing_forward", "sharing", size) if size in self._sharing else None
            self._graphs[size] = graphs._Size(forward, sample, sharing)  # type: ignore[arg-type]

    def _sharing_forward(self, size: int) -> None:
        self._forward(size, self._shared_contexts(size))


class UnrecordedMixed(MixedGraphs):
    """The same of steps with prompts."""

    def capture(self, max_tokens: int, loaded: Collection[int] = ()) -> None:
        self._reserve(max_tokens)
        self._graphs = {size: Again(self, "_forward", "mixed", size) for size in self._counts}  # type: ignore[misc]


class Again:
    def __init__(self, owner: Any, method: str, name: str, size: int) -> None:
        self._run = lambda: getattr(owner, method)(size)
        self._name = name

    def replay(self) -> None:
        REPLAYED[self._name] += 1
        self._run()


def unrecorded_graphs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Have resident runners made with such graphs from now on; counts what they replay."""
    make = Worker.make_runner

    def recorded(self: Worker, **settings: Any) -> Any:
        runner = make(self, **settings)
        if isinstance(runner, ResidentRunner):
            shares = not self._settings.disable_cascade_attn
            runner.capture(settings["num_slots"], settings["max_step_tokens"], shares=shares)
        return runner

    REPLAYED.update(forward=0, sample=0, mixed=0, sharing=0)
    monkeypatch.setattr(Worker, "make_runner", recorded)
    monkeypatch.setattr("octavo.worker.resident.runner.DecodeGraphs", Unrecorded)
    monkeypatch.setattr("octavo.worker.resident.runner.MixedGraphs", UnrecordedMixed)
    return REPLAYED
