"""`Updates`: read weights in a thread while the engine runs with the current ones."""

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
    """Staged weights that replace the current ones once the engine has settled.

    Attributes:
        command: the front end's command.
        staged: the new weights.
        resumes: resume the engine afterwards, since only this update has paused it.
    """

    command: wire.UpdateWeights
    staged: Staged
    resumes: bool

    @property
    def call(self) -> int:
        return self.command.call


@dataclass(slots=True)
class WeightUpdate(Generic[C]):
    """A command that a front end waits for."""

    client: C
    command: wire.WeightCommand
    done: Future[Any]


class Updates(Generic[C]):
    """Runs jobs one after another, in the order of their arrival."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="octavo-weights")
        self._jobs: list[WeightUpdate[C]] = []

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def begin(self, client: C, command: wire.WeightCommand, work: Callable[[], Any]) -> None:
        self._jobs.append(WeightUpdate(client, command, self._threads.submit(work)))

    def done(self) -> Iterator[WeightUpdate[C]]:
        """Yield the jobs that have ended since the last call, in order."""
        while self._jobs and self._jobs[0].done.done():
            yield self._jobs.pop(0)

    def close(self) -> None:
        """Start no further job."""
        self._threads.shutdown(wait=False, cancel_futures=True)
