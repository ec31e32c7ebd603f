"""Positions of tokens around and in images: M-RoPE (Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.features.media.payload import MediaItem


@dataclass(frozen=True, slots=True)
class Positions:
    """What is added to a token's place in the sequence for its position along each of three axes: time, rows, columns.

    An image's tokens have one time; their rows and columns count from it. Text goes on after the largest of them, and
    has the same position along all axes.

    Attributes:
        shifts: [prompt tokens, 3] int32, not positive.
        after: of all later tokens.
    """

    shifts: NDArray[np.int32]
    after: int

    @classmethod
    def of(cls, items: Sequence[MediaItem], num_prompt: int) -> Positions:
        shifts = np.zeros((num_prompt, 3), dtype=np.int32)
        after = 0
        for item in items:
            rows, columns = item.layout
            start, end = item.start, item.end
            places = np.arange(item.count)
            axes = np.stack([np.zeros_like(places), places // columns, places % columns], axis=1)
            shifts[start:end] = after + axes - places[:, None]
            after += max(rows, columns) - item.count
            shifts[end:] = after
        return cls(shifts, after)

    def between(self, first: int, end: int) -> memoryview:
        """Return the shifts of positions [first, end), as [count, 3] int32."""
        known = self.shifts[first:end]
        rest = np.full((end - first - len(known), 3), self.after, dtype=np.int32)
        return memoryview(np.concatenate([known, rest]).tobytes())
