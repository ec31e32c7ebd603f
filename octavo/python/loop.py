"""`SharedLoop`: an engine loop that several calls of one program drive by turns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence

from octavo.core.errors import EngineStateError
from octavo.core.output import TokenDelta
from octavo.core.pausing import Part, PauseMode
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.executor import Staged, WorkerPort
from octavo.engine.loop import EngineLoop

_STARVED_PAUSE_S = 0.001


class SharedLoop:
    """Who waits for news steps the loop; what that brings to others' requests is kept for them.

    So two streams may be read in turn, and a call may be made while a stream is open.

    Attributes:
        loop: for whoever drives it alone.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._mail: dict[str, deque[TokenDelta]] = {}
        """Request -> the news, not read yet, of the `run` that it belongs to."""

    def run(self, requests: Sequence[GenerateRequest]) -> Generator[TokenDelta, None, None]:
        """The news of these requests until all have ended. Closing the iterator early aborts what is left.

        Raises:
            InvalidRequestError: one of them can never fit; none has been computed then.
        """
        mail: deque[TokenDelta] = deque()
        open_choices: dict[str, int] = {}
        try:
            for request in requests:
                self.loop.add(request)
                self._mail[request.id] = mail
                open_choices[request.id] = request.params.n
            while open_choices:
                while not mail:
                    self._step()
                delta = mail.popleft()
                if delta.finish is not None:
                    open_choices[delta.id] -= 1
                    if not open_choices[delta.id]:
                        del open_choices[delta.id], self._mail[delta.id]
                yield delta
        finally:
            for request_id in open_choices:
                del self._mail[request_id]
                self.loop.abort(request_id)
            while self.loop.busy and not self._mail:  # else the other runs see to it
                self.loop.step()

    def abort(self, request_id: str, index: int) -> None:
        """End one choice of a request; its `run` is told so."""
        self._deliver(self.loop.abort(request_id, index))

    def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause what runs as the mode says, then give memory back.

        Raises:
            EngineStateError: the engine was not made for it.
        """
        self.loop.check_sleep(level)
        self._deliver(self.loop.pause(mode))
        while not self.loop.settled:
            self._step()
        self.loop.sleep(level)

    def wake_up(self, parts: Iterable[Part]) -> bool:
        """Take the memory of these parts again; whether the engine is awake."""
        self._deliver(self.loop.wake_up(parts))
        return not self.loop.paused

    def update_weights(
        self,
        stage: Callable[[WorkerPort], Staged],
        mode: PauseMode = PauseMode.KEEP,
        version: str | None = None,
        *,
        flush_cache: bool = True,
    ) -> None:
        """Put other weights in the place of those in use; a pause that there is goes on afterwards.

        Args:
            stage: reads the weights.
            mode: what becomes of what runs.
        """
        staged, was_paused = stage(self.loop.check_weights()), self.loop.paused
        if not was_paused or mode is PauseMode.ABORT:
            self._deliver(self.loop.pause(mode))
        while not self.loop.settled:
            self._step()
        try:
            self.loop.update_weights(staged, version, flush_cache=flush_cache)
        finally:
            if not was_paused:
                self._deliver(self.loop.resume())

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def close(self) -> None:
        """Free the device. No `run` may go on after it."""
        self.loop.close()

    def _step(self) -> None:
        """
        Raises:
            EngineStateError: the engine sleeps, so that there is nothing to wait for.
            DeviceLostError: nothing can be computed any more.
        """
        self.loop.check_alive()
        if self.loop.settled:
            raise EngineStateError("The engine sleeps; call wake_up() first.")
        if self.loop.starved and self.loop.busy:
            time.sleep(_STARVED_PAUSE_S)
        self._deliver(self.loop.step())

    def _deliver(self, news: Iterable[TokenDelta]) -> None:
        for delta in news:
            if delta.id in self._mail:
                self._mail[delta.id].append(delta)
