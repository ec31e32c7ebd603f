"""`SharedLoop`: an engine loop that several calls of one program drive by turns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence

from octavo.core.output import TokenDelta
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
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

    def stats(self) -> EngineStats:
        return self.loop.stats()

    def close(self) -> None:
        """Free the device. No `run` may go on after it."""
        self.loop.close()

    def _step(self) -> None:
        if self.loop.starved and self.loop.busy:
            time.sleep(_STARVED_PAUSE_S)
        self._deliver(self.loop.step())

    def _deliver(self, news: Iterable[TokenDelta]) -> None:
        for delta in news:
            if delta.id in self._mail:
                self._mail[delta.id].append(delta)
