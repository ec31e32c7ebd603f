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

    An image's tokens have one time; their rows and columns count from it. So do those of a group of frames of a video,
    whose times differ. Text goes on after the largest of them, and has the same position along all axes.

    Attributes:
        shifts: [prompt tokens, 3] int32.
        after: of all later tokens.
    """

    shifts: NDArray[np.int32]
    after: int

    @classmethod
    def of(cls, items: Sequence[MediaItem], num_prompt: int) -> Positions:
        shifts = np.zeros((num_prompt, 3), dtype=np.int32)
        after = origin = 0
        runs = sorted((run, number) for number, item in enumerate(items) for run in item.runs)
        for (start, first, count), number in runs:
            item = items[number]
            rows, columns = item.layout
            if not item.group:
                origin = start + after
                furthest = origin
            groups, places = np.divmod(np.arange(first, first + count), rows * columns)
            times = np.asarray(item.times or [0] * (int(groups[-1]) + 1))[groups]
            axes = np.stack([times, places // columns, places % columns], axis=1)
            shifts[start : start + count] = origin + axes - np.arange(start, start + count)[:, None]
            furthest = max(furthest, origin + max(rows, columns, int(times.max()) + 1))
            after = furthest - start - count
            shifts[start + count :] = after
        return cls(shifts, after)

    def between(self, first: int, end: int) -> memoryview:
        """Return the shifts of positions [first, end), as [count, 3] int32."""
        known = self.shifts[first:end]
        rest = np.full((end - first - len(known), 3), self.after, dtype=np.int32)
        return memoryview(np.concatenate([known, rest]).tobytes())
