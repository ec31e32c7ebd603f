"""Plan of a decoding launch over contexts of unequal lengths: parts of about equal length, however many a row has.

With equal numbers of parts for all rows, a batch takes as long as its longest context. The plan is made on the device,
once for all layers of a step, so that recorded steps follow the lengths of each replay.

Plan: [slots, 4] int32: item, part, parts of the item, and number of its first part among those of all divided items; an
item of -1 is unused. Behind it counters of parts that have ended, int32, zeros between launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from octavo.device.launch_sizes import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 64
"""Minimum keys of a part; shorter ones take longer to merge than to read."""
MOST = 128
"""Maximum number of parts of an item: one program merges them."""
_WIDE = 1024
"""Integers that are stored at a time, and items for which one kernel is compiled."""


class Bounds(NamedTuple):
    """What parts of items may be.

    Attributes:
        least: minimum keys of a part.
        most: maximum number of parts of an item.
        beside: keys that take as long as the begin and the end of a part; 0 if the parts of a multiprocessor overlap.
    """

    least: int
    most: int
    beside: int = 0


@triton.jit(do_not_specialize=["count", "more", "counters", "at_once"])
def plan_kernel(
    plan,
    rows,
    seq_lens,
    count,
    more,
    counters,
    at_once,
    LEAST_KEYS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Divide `count` items into at most `more` parts beyond one of each. One program.

    With n keys altogether and parts of at least n / more, rounding each item's number of parts down keeps to that.

    With BESIDE > 0, `more` is twice `at_once`, and parts twice as long are tried, too. Those are chosen whose rounds of
    `at_once` should be over first, if each takes as long as BESIDE keys more.
    """
    item = tl.arange(0, BLOCK)
    valid = item < count
    row = item
    if HAS_ROWS:
        row = tl.load(rows + item, mask=valid, other=0)
    keys = tl.load(seq_lens + row, mask=valid, other=0)
    whole = tl.sum(keys.to(tl.int64), 0)
    parts = _parts(keys, valid, tl.maximum(tl.cdiv(whole, more), LEAST_KEYS), MOST_PARTS)
    if BESIDE > 0:
        longer = _parts(keys, valid, tl.maximum(tl.cdiv(whole, at_once), LEAST_KEYS), MOST_PARTS)
        if _took(keys, longer, whole, at_once, BESIDE) <= _took(keys, parts, whole, at_once, BESIDE):
            parts = longer
    begin = tl.cumsum(parts, 0) - parts
    divided = tl.where(parts > 1, parts, 0)
    first = tl.cumsum(divided, 0) - divided
    for part in range(tl.max(parts, 0)):
        slot, inside = plan + 4 * (begin + part), part < parts
        tl.store(slot, item, mask=inside)
        tl.store(slot + 1, part, mask=inside)
        tl.store(slot + 2, parts, mask=inside)
        tl.store(slot + 3, first, mask=inside)
    wide = tl.arange(0, WIDE)
    for begin in range(tl.sum(parts, 0), count + more, WIDE):
        tl.store(plan + 4 * (begin + wide), -1, mask=begin + wide < count + more)
    for begin in range(0, counters, WIDE):
        tl.store(plan + 4 * (count + more) + begin + wide, 0, mask=begin + wide < counters)


@triton.jit
def _parts(keys, valid, size, MOST_PARTS: tl.constexpr):
    """Return the number of parts of each item, none shorter than `size`."""
    return tl.where(valid, tl.minimum(tl.maximum(keys // size, 1), MOST_PARTS), 0).to(tl.int32)


@triton.jit
def _took(keys, parts, whole, at_once, BESIDE: tl.constexpr):
    """Return the time of all parts, in keys: that of the longest, or of the rounds of mean parts."""
    slots = tl.sum(parts, 0)
    rounds = tl.cdiv(slots, at_once)
    longest = tl.max(tl.cdiv(keys, tl.maximum(parts, 1)), 0)
    return tl.maximum(longest + BESIDE, rounds * (tl.cdiv(whole, slots) + BESIDE))


def launch(
    plan: Tensor,
    rows: Tensor | None,
    seq_lens: Tensor,
    count: int,
    more: int,
    counters: int,
    bounds: Bounds | None = None,
) -> None:
    """Launch `plan_kernel`.

    Args:
        plan: [4 (count + more) + counters] int32.
        rows: [count] int32, of the step; None for its first ones.
        bounds: None for those of ordinary attention.
    """
    bounds = bounds or Bounds(LEAST, MOST)
    plan_kernel[(1,)](
        plan,
        seq_lens if rows is None else rows,
        seq_lens,
        count,
        more,
        counters,
        max(1, more // 2),
        LEAST_KEYS=bounds.least,
        MOST_PARTS=bounds.most,
        BESIDE=bounds.beside,
        BLOCK=max(_WIDE, next_power_of_2(count)),
        WIDE=_WIDE,
        HAS_ROWS=rows is not None,
        num_warps=8,
    )
