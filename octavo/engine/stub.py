"""`StubLoop`: an engine core without a model, for tests and measurements of the server in front of it.

It has a process and a socket like a real core (`CoreProcess("octavo.engine.stub", Stub(...))`), but all its requests
run at once and every step gives each the next token of a fixed text, at a fixed rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.errors import DeviceLostError, UnsupportedError
from octavo.core.info import ModelInfo
from octavo.core.output import FinishReason, RequestTimes, TokenDelta
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.core_server import CoreServer
from octavo.engine.executor import Staged, WorkerPort
from octavo.engine.process import receive_payload


@dataclass(frozen=True, slots=True)
class Stub:
    """
    Attributes:
        info: the reported model.
        tokens: output of every request, repeated as needed.
        step_s: seconds from step to step.
        aligned: step k gives every request token k, so that a token identifies its step.
        crowd: run no step before this many requests have arrived.
        log: file to write the `time.monotonic()` of each step to at the end, one per line.
    """

    info: ModelInfo
    tokens: tuple[int, ...]
    step_s: float
    aligned: bool = False
    crowd: int = 0
    log: str | None = None


@dataclass(slots=True)
class _StubRequest:
    request: GenerateRequest
    open: set[int]
    began: float = field(default_factory=time.monotonic)
    count: int = 0


class StubLoop:
    """Substitute for an `EngineLoop`."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._rows: dict[str, _StubRequest] = {}
        self._stats = EngineStats(num_blocks=stub.info.num_blocks, block_size=stub.info.block_size)
        self._next = 0.0
        self._waits = True
        self._times: list[float] = []

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    @property
    def starved(self) -> bool:
        return self._waits

    @property
    def awaits(self) -> bool:
        return False

    @property
    def lost(self) -> DeviceLostError | None:
        return None

    def add(self, request: GenerateRequest) -> None:
        self._rows[request.id] = _StubRequest(request, set(range(request.params.n)))
        self._stats.prompt_tokens += len(request.tokens)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        row = self._rows.get(request_id)
        if row is None:
            return []
        ended = row.open & ({index} if index is not None else row.open)
        row.open = row.open - ended
        if not row.open:
            del self._rows[request_id]
        return [TokenDelta(request_id, one, [], finish=FinishReason.ABORT, times=_times(row)) for one in sorted(ended)]

    def step(self) -> list[TokenDelta]:
        """Wait for the step's time; return the next token of every request."""
        self._waits = self._waits and len(self._rows) < self._stub.crowd
        if self._waits:
            return []
        now = time.monotonic()
        if now < self._next:
            time.sleep(self._next - now)
        self._next = max(now, self._next) + self._stub.step_s
        tokens = self._stub.tokens
        deltas: list[TokenDelta] = []
        for row in list(self._rows.values()):
            token = tokens[(len(self._times) if self._stub.aligned else row.count) % len(tokens)]
            row.count += 1
            last = row.count >= (row.request.params.max_tokens or 1)
            finish, times = (FinishReason.LENGTH, _times(row)) if last else (None, None)
            deltas += [TokenDelta(row.request.id, one, [token], finish=finish, times=times) for one in row.open]
            if last:
                del self._rows[row.request.id]
        if self._stub.log is not None:
            self._times.append(time.monotonic())
        self._stats.generation_tokens += len(deltas)
        self._stats.num_steps += 1
        return deltas

    @property
    def settled(self) -> bool:
        return not self._rows

    def pause(self, mode: PauseMode) -> list[TokenDelta]:
        """Raise UnsupportedError: a stub can't be paused."""
        raise UnsupportedError("A stub can't be paused.")

    def resume(self) -> list[TokenDelta]:
        """Do nothing: a stub is never paused."""
        return []

    def check_sleep(self, level: int) -> None:
        raise UnsupportedError("A stub can't sleep.")

    def sleep(self, level: int) -> None:
        """Never called: a stub can't be paused."""

    def wake_up(self, parts: Iterable[SleepTag]) -> list[TokenDelta]:
        """Do nothing: a stub never sleeps."""
        return []

    def check_weights(self) -> WorkerPort:
        raise UnsupportedError("A stub has no weights.")

    def update_weights(self, staged: Staged, version: str | None = None, *, flush_cache: bool = True) -> None:
        """Never called: `check_weights` raises."""

    def start_profile(self, prefix: str = "") -> None:
        raise UnsupportedError("A stub can't be profiled.")

    def stop_profile(self) -> str:
        """Return "": no profile is ever running."""
        return ""

    def call(self, feature: str, method: str, args: Mapping[str, Any]) -> Any:
        raise UnsupportedError("A stub has no features.")

    def idle(self) -> None:
        """Do nothing."""

    def reset_prefix_cache(self) -> None:
        """Do nothing: a stub has no cache."""

    def stats(self) -> EngineStats:
        self._stats.num_running = len(self._rows)
        return self._stats

    def check_idle(self, *, books: bool = True) -> None:
        """Do nothing: a stub has no blocks."""

    def mend(self) -> None:
        """Do nothing: nothing is left of requests."""

    def close(self) -> None:
        """Write the log of step times."""
        if self._stub.log is not None:
            Path(self._stub.log).write_text("".join(f"{moment:.6f}\n" for moment in self._times), encoding="ascii")


def _times(row: _StubRequest) -> RequestTimes:
    return RequestTimes(row.request.arrival or row.began, row.began, row.began, time.monotonic())


def main() -> int:
    listener, stub = receive_payload()
    return CoreServer(listener).run(lambda on_phase: (StubLoop(stub), stub.info))


if __name__ == "__main__":
    sys.exit(main())
