"""`Realms`: names what the content of KV pages depends on, so that tiers never mix pages of different weights."""

from __future__ import annotations

from uuid import uuid4

from octavo.engine.executor import WorkerPort
from octavo.schedule.scheduler import Scheduler


class Realms:
    """Keeps the scheduler's realm (`cache/tier.py`) up to date with the weights.

    Args:
        content: the model's files and the form of its pages.
    """

    def __init__(self, content: str, worker: WorkerPort, scheduler: Scheduler) -> None:
        self._content = content
        self._worker = worker
        self._scheduler = scheduler
        self._names = {worker.weight_version: "files"}
        """Version of the weights -> their part of the realm."""
        self.refresh()

    def refresh(self) -> None:
        """The worker has the weights that it says it has, and an empty KV cache."""
        self._enter(self._names.setdefault(self._worker.weight_version, uuid4().hex))

    def replaced(self, version: str | None, *, flushed: bool) -> None:
        """The weights were replaced.

        Args:
            version: the user's name for them, which engines with the same weights may share; None if there is none.
            flushed: what was cached is forgotten. Else pages depend on old and new weights, and no other engine can use
                them.
        """
        self._names[self._worker.weight_version] = f"update {version}" if version else uuid4().hex
        if flushed:
            self.refresh()
        else:
            self._enter(uuid4().hex)

    def _enter(self, weights: str) -> None:
        self._scheduler.enter(f"{self._content}/{weights}")
