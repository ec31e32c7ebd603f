"""`History`: outputs of earlier requests, as one text to search."""

from __future__ import annotations

from collections import deque

import numpy as np

from octavo.features.speculation.lookup import NOTHING, Tokens

_MOST_TOKENS = 1 << 16
"""Most tokens of all outputs; searching them takes about 20 us."""
_SEPARATOR = np.array([-2], dtype=np.int32)
"""Between two outputs; matches no token."""


class History:
    """The last outputs, up to a number of requests and 65,536 tokens."""

    def __init__(self, most_requests: int) -> None:
        self._most = most_requests
        self._outputs: deque[Tokens] = deque()
        self._size = 0
        self._text: Tokens | None = NOTHING

    def add(self, output: list[int]) -> None:
        """Add an output; drop the oldest ones that exceed the limits."""
        added = np.array(output[-_MOST_TOKENS:], dtype=np.int32)
        self._outputs.append(added)
        self._size += len(added)
        while len(self._outputs) > self._most or self._size > _MOST_TOKENS:
            self._size -= len(self._outputs.popleft())
        self._text = None

    @property
    def text(self) -> Tokens:
        """All outputs, a separator after each."""
        if self._text is None:
            self._text = np.concatenate([part for one in self._outputs for part in (one, _SEPARATOR)])
        return self._text
