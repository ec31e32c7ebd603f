"""Batch sizes of decoding that are recorded. Without triton, so that memory can be planned on any machine."""

from __future__ import annotations

MAX_ROWS = 1024
_UNEQUAL = 2
"""How many times its equal share a rank may have of the most requests. Steps with larger parts are not recorded."""


def sizes(max_rows: int) -> list[int]:
    """Return the batch sizes of decoding to record, ascending; the largest is `max_rows` or 1,024."""
    top = min(max_rows, MAX_ROWS)
    wanted = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, MAX_ROWS + 1, 64)]
    return sorted({size for size in wanted if size < top} | {top})


def own_sizes(ranks: int, max_rows: int) -> list[int]:
    """Return the rows of whole steps to record if each rank runs the layers on its own rows, ascending multiples of
    `ranks`.

    Padding included, these are no more than a step may have tokens: each rank may have one for each request.

    Args:
        max_rows: limit of a step.
    """
    return [ranks * size for size in sizes(min(max_rows, _UNEQUAL * -(-max_rows // ranks)))]
