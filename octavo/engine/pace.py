"""`Pace`: plan a step as late as the device allows, so that requests that arrive meanwhile are part of it.

While the device computes one step, the next one must be launched, or the device would wait. Planned at once, it would
leave out whoever arrives during the current step, who would wait for two whole steps, and not for one. So how long
steps take is learned from the last ones of the same size, and a step is planned shortly before the device is done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT = 4
"""Steps of a size whose times are kept; with fewer, nothing is known."""
_FINE = 4
"""Sizes of a power of two that are told apart."""
_SURE = 0.9
"""Share of the shortest of these times that the device surely takes."""
_HOST = 1.5
"""Multiple of the host's longest lately that planning and launching takes at most."""
_DECAY = 0.95
_SPARE_S = 0.0005
_WAITED_S = 0.0002
"""Who waited so long for a step's output was there before its end, which is known thereby."""
_LATE = 0.7
"""Share of a step's time that is assumed if it had ended before it was waited for."""

Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launched step; blocks: of the KV cache, in use."""

    size: Size
    tokens: int
    blocks: int
    at: float


class Pace:
    """Times of launched steps, which run one after another. All times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._times: dict[Size, deque[tuple[float, int, int]]] = {}
        self._flight: deque[_Launch] = deque()
        self._ended = 0.0
        self._host = 0.0

    def launched(self, tokens: int, rows: int, blocks: int, spent: float, at: float) -> None:
        """Record a launch.

        Args:
            blocks: of the KV cache that are in use, of which attention reads some.
            spent: what planning and launching took on the host.
        """
        self._flight.append(_Launch((_magnitude(tokens), _magnitude(rows)), tokens, blocks, at))
        self._host = max(_DECAY * self._host, spent)

    def ended(self, waited: float, at: float) -> None:
        """Record that the output of the oldest step has been read, after waiting for it."""
        step = self._flight.popleft()
        taken = at - max(self._ended, step.at)
        self._ended = at
        times = self._times.setdefault(step.size, deque(maxlen=_KEPT))
        times.append((taken if waited > _WAITED_S else _LATE * taken, step.tokens, step.blocks))

    def spare(self, now: float) -> float:
        """Return how long planning the next step can wait; 0 unless exactly one step is in flight."""
        if len(self._flight) != 1:
            return 0.0
        step = self._flight[0]
        times = self._times.get(step.size, ())
        if len(times) < _KEPT:  # each of them may have been longer for a reason of its own, such as a compilation
            return 0.0
        taken = min(
            time * min(1.0, step.tokens / max(tokens, 1)) * min(1.0, step.blocks / max(blocks, 1))
            for time, tokens, blocks in times
        )
        due = max(self._ended, step.at) + _SURE * taken - _HOST * self._host - _SPARE_S
        return max(0.0, due - now)

    def forget(self) -> None:
        """Forget the steps in flight, which were dropped."""
        self._flight.clear()


def _magnitude(count: int) -> int:
    """Return the number of a size among those that are told apart: _FINE for each power of two."""
    if count < 2 * _FINE:
        return count
    power = count.bit_length() - 1
    return _FINE * power + (count >> power - 2) % _FINE
