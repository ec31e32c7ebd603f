"""Apply top-k, top-p and min-p to rows of logits without sorting.

Most filters keep some dozens of tokens. A first pass therefore finds the largest logit of each group of neighbours; the
k-th largest of these is a floor that at least k logits reach, and few more do. These are gathered, and the exact cut
and the draw consider only them. If they are too few (a wide nucleus) or too many (ties), a bisection over the whole row
takes over. Cf. Park et al. 2026, "Qrita", https://arxiv.org/abs/2602.01518.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.sampling.triton_draw import MIN_P, TEMPERATURE, TOP_K, TOP_P, noise, real, whole

GROUP = tl.constexpr(128)
_BOTTOM = tl.constexpr(-2137108967)
"""-3e38, below all relevant logits, in the encoding of `_ordered`."""


@triton.jit
def _wants(settings, slot):
    """Return whether a row is not greedy and has filters."""
    cut = (real(settings, slot, TOP_P) < 1.0) | (real(settings, slot, MIN_P) > 0.0) | (whole(settings, slot, TOP_K) > 0)
    return (real(settings, slot, TEMPERATURE) > 0.0) & cut


@triton.jit
def peaks_kernel(slots, settings, logits, maxima, sums, vocab, BLOCK: tl.constexpr):
    """For a part of a row: each group's largest logit, and the sum of exp(logit / temperature - the part's largest).

    `sums` holds that sum, the part's largest logit, and 1.0 if any is NaN or +inf.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    slot = tl.load(slots + row).to(tl.int64)
    if _wants(settings, slot):
        temperature = real(settings, slot, TEMPERATURE)
        i = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * vocab + i, mask=i < vocab, other=float("-inf"))
        bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
        GROUPS: tl.constexpr = BLOCK // GROUP
        largest = tl.max(tl.reshape(x, [GROUPS, GROUP]), 1)
        peak = tl.max(largest, 0)
        finite = tl.minimum(tl.maximum(peak, -1.0e30), 1.0e30)
        weight = tl.sum(tl.exp((x - finite) / temperature), 0)
        tl.store(maxima + (row * parts + part) * GROUPS + tl.arange(0, GROUPS), largest)
        place = sums + (row * parts + part) * 3
        tl.store(place, weight)
        tl.store(place + 1, peak)
        tl.store(place + 2, bad.to(tl.float32))


@triton.jit
def _ordered(bits):
    """Map float32 bits to int32 of the same order; its own inverse."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _as_float(ordered):
    return _ordered(ordered).to(tl.float32, bitcast=True)


@triton.jit
def _sum_from(row, vocab, floor, peak, temperature, BLOCK: tl.constexpr):
    """Return the number of logits >= `floor`, and the sum of exp((logit - peak) / temperature) over them."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        kept = (x >= floor) & (x > float("-inf"))
        count += kept.to(tl.int32)
        weight += tl.where(kept, tl.exp((x - peak) / temperature), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _gather(row, vocab, floor, target, BLOCK: tl.constexpr):
    """Gather the logits >= `floor` into `target`, visible to all threads of the program."""
    held = 0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        kept = ((x >= floor) & (x > float("-inf"))).to(tl.int32)
        tl.store(target + held + tl.cumsum(kept, 0) - 1, x, mask=kept == 1)
        held += tl.sum(kept, 0)
    tl.debug_barrier()


@triton.jit
def few_kernel(
    slots,
    settings,
    length,
    logits,
    maxima,
    sums,
    lists,
    values,
    ids,
    floors,
    last_ties,
    drawn,
    vocab,
    parts,
    groups,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Filter and draw one row from its largest logits, at most ROOM of them, gathered in the row's `values` and `ids`.
    If they don't suffice, or the row has no filters, `drawn` is -2; if no token is possible, -1."""
    r = tl.program_id(0)
    slot = tl.load(slots + r).to(tl.int64)
    token = -2
    floor = float("-inf")
    last_tie = vocab
    if _wants(settings, slot):
        temperature = real(settings, slot, TEMPERATURE)
        top_p = real(settings, slot, TOP_P)
        min_p = real(settings, slot, MIN_P)
        top_k = whole(settings, slot, TOP_K)
        p = tl.arange(0, PARTS)
        place = sums + (r * parts + p) * 3
        peaks = tl.load(place + 1, mask=p < parts, other=float("-inf"))
        peak = tl.minimum(tl.maximum(tl.max(peaks, 0), -1.0e30), 1.0e30)
        bad = tl.max(tl.load(place + 2, mask=p < parts, other=0.0), 0)
        total = tl.sum(tl.load(place, mask=p < parts, other=0.0) * tl.exp((peaks - peak) / temperature), 0)
        top = _ordered(peak.to(tl.int32, bitcast=True))

        # At least this many groups, and few more, have a logit >= `low`.
        wanted = tl.where((top_k > 0) & (top_k < MOST), top_k, MOST)
        g = tl.arange(0, GROUPS)
        largest = tl.load(maxima + r * groups + g, mask=g < groups, other=float("-inf"))
        low = tl.zeros_like(top) + _BOTTOM
        high = top + 1
        reached = groups
        while (low + 1 < high) & (reached > wanted + 8):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            count = tl.sum((largest >= _as_float(middle)).to(tl.int32), 0)
            reached = tl.where(count >= wanted, count, reached)
            high = tl.where(count >= wanted, high, middle)
            low = tl.where(count >= wanted, middle, low)
        floor = _as_float(tl.zeros_like(top) + _BOTTOM)
        if min_p > 0.0:
            floor = tl.maximum(floor, peak + temperature * tl.log(min_p))
        pivot = tl.maximum(_as_float(low), floor)
        all_there = _as_float(low) <= floor
        hit = (largest >= pivot).to(tl.int32)
        hits = tl.sum(hit, 0)
        tl.store(lists + r * GROUPS + tl.cumsum(hit, 0) - 1, g, mask=hit == 1)
        tl.debug_barrier()
        row = logits + r.to(tl.int64) * vocab
        e = tl.arange(0, BLOCK)
        held = 0
        for first in range(0, hits, BLOCK // GROUP):
            j = first + e // GROUP
            i = tl.load(lists + r * GROUPS + j, mask=j < hits, other=0) * GROUP + e % GROUP
            x = tl.load(row + i, mask=(j < hits) & (i < vocab), other=float("-inf"))
            kept = ((x >= pivot) & (x > float("-inf"))).to(tl.int32)
            at = held + tl.cumsum(kept, 0) - 1
            tl.store(values + r * ROOM + at, x, mask=(kept == 1) & (at < ROOM))
            tl.store(ids + r * ROOM + at, i, mask=(kept == 1) & (at < ROOM))
            held += tl.sum(kept, 0)
        tl.debug_barrier()

        c = tl.arange(0, ROOM)
        x = tl.load(values + r * ROOM + c, mask=c < held, other=float("-inf"))
        i = tl.load(ids + r * ROOM + c, mask=c < held, other=vocab)
        weight = tl.exp((x - peak) / temperature)
        here = tl.sum(weight, 0)
        cut = (top_k > 0) & (held > top_k)
        if all_there | ((top_k > 0) & (top_k <= MOST)):
            total = here
            sure = held <= ROOM
        else:
            sure = (held <= ROOM) & (top_k == 0) & (min_p == 0.0) & (top_p < 1.0) & (here >= top_p * total)
        if (bad > 0.0) | (held == 0):
            token = -1
        elif sure:
            ties = vocab
            floor = pivot
            low = _ordered(floor.to(tl.int32, bitcast=True))
            if cut:
                high = top + 1
                while low + 1 < high:
                    middle = (low >> 1) + (high >> 1) + (low & high & 1)
                    enough = tl.sum((x >= _as_float(middle)).to(tl.int32), 0) >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                floor = _as_float(low)
                ties = top_k - tl.sum((x > floor).to(tl.int32), 0)
                total = tl.sum(tl.where(x > floor, weight, 0.0), 0)
                total += ties.to(tl.float32) * tl.exp((floor - peak) / temperature)
            if top_p < 1.0:
                goal = top_p * total
                start = low
                high = top + 1
                while low + 1 < high:
                    middle = (low >> 1) + (high >> 1) + (low & high & 1)
                    enough = tl.sum(tl.where(x >= _as_float(middle), weight, 0.0), 0) >= goal
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle)
                floor = _as_float(low)
                above = tl.sum(tl.where(x > floor, weight, 0.0), 0)
                needed = tl.ceil((goal - above) / tl.maximum(tl.exp((floor - peak) / temperature), 1.0e-30))
                needed = tl.maximum(tl.minimum(needed, 1.0e9), 1.0).to(tl.int32)
                ties = tl.where(low == start, tl.minimum(ties, needed), needed)
            tie = (x == floor).to(tl.int32)
            kept_tie = (tie == 1) & (tl.cumsum(tie, 0) <= ties)
            if ties < vocab:
                last_tie = tl.max(tl.where(kept_tie, i, -1), 0)
            score = x / temperature + noise(settings, length, slot, i)
            score = tl.where((x > floor) | kept_tie, score, float("-inf"))
            best = tl.max(score, 0)
            token = tl.min(tl.where(score == best, i, vocab), 0)
    tl.store(floors + r, floor)
    tl.store(last_ties + r, last_tie)
    tl.store(drawn + r, token)


@triton.jit
def filter_kernel(slots, settings, logits, scratch, floors, last_ties, drawn, vocab, BLOCK: tl.constexpr):
    """Find the cut of min_p, top_k and top_p: logits above `floor` are kept, and those equal to it up to an id.

    Each filter applies to the logits that the one before it kept; ties go to the lower id. A bisection over the ordered
    bits of float32 finds each floor exactly. It begins on the whole row; once at most `BLOCK` logits remain that
    certainly include the floors, it continues with those alone, in `scratch` [rows, BLOCK]. `drawn` rows are skipped.
    """
    r = tl.program_id(0)
    if tl.load(drawn + r) >= -1:
        return
    slot = tl.load(slots + r).to(tl.int64)
    temperature = real(settings, slot, TEMPERATURE)
    top_p = real(settings, slot, TOP_P)
    min_p = real(settings, slot, MIN_P)
    top_k = whole(settings, slot, TOP_K)
    floor = float("-inf")
    last_tie = vocab
    if _wants(settings, slot):
        row = logits + r.to(tl.int64) * vocab
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            i = first + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(row + i, mask=i < vocab, other=float("-inf")))
        peak = tl.max(best, 0)
        if min_p > 0.0:
            floor = peak + temperature * tl.log(min_p)
        count, total = _sum_from(row, vocab, floor, peak, temperature, BLOCK)
        ties = vocab
        top = _ordered(peak.to(tl.int32, bitcast=True))
        # Every floor is at least `pivot`: enough logits, or enough weight, lie at or above it.
        pivot = _ordered(tl.maximum(floor, -3.0e38).to(tl.int32, bitcast=True))
        cut = (top_k > 0) & (count > top_k)
        enough = tl.where(cut, top_k, 1)
        heavy = tl.where(cut, 0.0, tl.where(top_p < 1.0, top_p * total, total))
        left = count
        high = top + 1
        searched = cut | (top_p < 1.0)
        while searched & (pivot + 1 < high) & (left > BLOCK):
            middle = (pivot >> 1) + (high >> 1) + (pivot & high & 1)
            reached, weight = _sum_from(row, vocab, _as_float(middle), peak, temperature, BLOCK)
            below = (reached >= enough) & (weight >= heavy)
            pivot = tl.where(below, middle, pivot)
            left = tl.where(below, reached, left)
            high = tl.where(below, high, middle)
        source = row
        size = vocab
        if searched & (left <= BLOCK):
            source = scratch + r.to(tl.int64) * BLOCK
            size = left
            _gather(row, vocab, _as_float(pivot), source, BLOCK)
        if cut:
            # The highest floor that at least k logits reach is in [low, high).
            low = pivot
            high = top + 1
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                reached, _ = _sum_from(source, size, _as_float(middle), peak, temperature, BLOCK)
                low = tl.where(reached >= top_k, middle, low)
                high = tl.where(reached >= top_k, high, middle)
            floor = _as_float(low)
            above, weight = _sum_from(source, size, _as_float(low + 1), peak, temperature, BLOCK)
            ties = top_k - above
            total = weight + ties.to(tl.float32) * tl.exp((floor - peak) / temperature)
        if top_p < 1.0:
            goal = top_p * total
            low = tl.maximum(pivot, _ordered(tl.maximum(floor, -3.0e38).to(tl.int32, bitcast=True)))
            start = low
            high = top + 1
            while low + 1 < high:
                middle = (low >> 1) + (high >> 1) + (low & high & 1)
                _, weight = _sum_from(source, size, _as_float(middle), peak, temperature, BLOCK)
                low = tl.where(weight >= goal, middle, low)
                high = tl.where(weight >= goal, high, middle)
            found = _as_float(low)
            _, weight = _sum_from(source, size, _as_float(low + 1), peak, temperature, BLOCK)
            each = tl.maximum(tl.exp((found - peak) / temperature), 1.0e-30)
            needed = tl.ceil((goal - weight) / each).to(tl.int32)
            ties = tl.where(low == start, tl.minimum(ties, needed), needed)
            ties = tl.maximum(ties, 1)
            floor = found
        if ties < vocab:
            seen = 0
            last_tie = -1
            for first in range(0, vocab, BLOCK):
                i = first + tl.arange(0, BLOCK)
                x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
                tie = (x == floor).to(tl.int32)
                rank = seen + tl.cumsum(tie, 0)
                last_tie = tl.maximum(last_tie, tl.max(tl.where((tie == 1) & (rank <= ties), i, -1), 0))
                seen += tl.sum(tie, 0)
    tl.store(floors + r, floor)
    tl.store(last_ties + r, last_tie)
