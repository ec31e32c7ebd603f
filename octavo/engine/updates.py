"""`Updates`: weights that are read in a thread, while the engine computes with those that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from octavo.engine import wire
from octavo.engine.executor import Staged

C = TypeVar("C")


@dataclass(slots=True)
class Update:
    """Weights that are to take their place once nothing is computed.

    Attributes:
        resumes: the engine goes on afterwards, for it stands still for this only.
    """

    command: wire.UpdateWeights
    staged: Staged
    resumes: bool

    @property
    def call(self) -> int:
        return self.command.call


@dataclass(slots=True)
class Job(Generic[C]):
    """What somebody waits for."""

    client: C
    command: wire.WeightCommand
    done: Future[Any]


class Updates(Generic[C]):
    """One job after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="octavo-weights")
        self._jobs: list[Job[C]] = []

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def begin(self, client: C, command: wire.WeightCommand, work: Callable[[], Any]) -> None:
        self._jobs.append(Job(client, command, self._threads.submit(work)))

    def done(self) -> Iterator[Job[C]]:
        """Those that have ended since the last look, in order."""
        while self._jobs and self._jobs[0].done.done():
            yield self._jobs.pop(0)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
