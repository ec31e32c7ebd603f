"""`SharedLoop`: an engine loop shared by several calls of one program."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from octavo.core.errors import EngineStateError
from octavo.core.output import TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.executor import Staged, WorkerPort
from octavo.engine.loop import EngineLoop

_STARVED_PAUSE_S = 0.001


class SharedLoop:
    """The caller that waits for output steps the loop; output of other callers' requests is queued for them.

    So two streams may be read alternately, and a call may be made while a stream is open.

    Attributes:
        loop: for exclusive use.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._mail: dict[str, deque[TokenDelta]] = {}
        """Request id -> unread output, in the queue of the `run` that it belongs to."""

    def run(self, requests: Sequence[GenerateRequest]) -> Generator[TokenDelta, None, None]:
        """Yield the output of these requests until all have ended. Closing the iterator early aborts the rest.

        Raises:
            InvalidRequestError: a request can never fit; then none has been computed.
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
            while self.loop.busy and not self._mail:  # otherwise the other runs handle it
                self.loop.step()

    def abort(self, request_id: str, index: int) -> None:
        """Abort one choice of a request; its `run` receives the end."""
        self._deliver(self.loop.abort(request_id, index))

    def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause as the mode requires, then release memory.

        Raises:
            EngineStateError: the engine does not support sleep.
        """
        self.loop.check_sleep(level)
        self._deliver(self.loop.pause(mode))
        while not self.loop.settled:
            self._step()
        self.loop.sleep(level)

    def wake_up(self, parts: Iterable[SleepTag]) -> bool:
        """Allocate the memory of these parts again. Return whether the engine is awake."""
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
        """Replace the current weights. An active pause stays active.

        Args:
            stage: reads the weights.
            mode: what happens to running requests.
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

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        """Call `EngineHook.call` of a feature and return its result; steps run meanwhile, if it takes a while.

        Raises:
            InvalidRequestError: there is no such feature or method, or it refuses the arguments.
            EngineStateError: it can't be done now.
        """
        value = self.loop.call(feature, method, args)
        if not isinstance(value, Future):
            return value
        while not value.done():
            if self.loop.busy:
                self._step()
            else:
                wait([value], _STARVED_PAUSE_S)
                self.loop.idle()
        return value.result()

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def close(self) -> None:
        """Release the device. No `run` may continue afterwards."""
        self.loop.close()

    def _step(self) -> None:
        """Step once.

        Raises:
            EngineStateError: the engine sleeps, so no output can arrive.
            DeviceLostError: the device is lost; nothing can be computed any more.
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
