"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first completed stop string, however the text is cut into pieces.

    If several end at the same character, the longest wins. Text is held back only while it may be the beginning of a
    stop string.

    Args:
        include: emit the stop string, too.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = list(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the text safe to emit, and the stop string found, if any, which ends the matching."""
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            self._held = ""
            end, start, stop = found
            return buffer[: end if self._include else start], stop
        keep = self._suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[int, int, str] | None:
        """Return end, start and text of the stop string that ends first."""
        places = ((buffer.find(stop), stop) for stop in self._stops)
        return min(((start + len(stop), start, stop) for start, stop in places if start >= 0), default=None)

    def _suffix(self, buffer: str) -> int:
        """Return the length of the longest suffix that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
