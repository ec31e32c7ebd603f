"""Sampling on a GPU without sorting: penalties by counts, thresholds by bisection, the draw by Gumbel noise.

The token that maximises logit / temperature + Gumbel noise is a sample from the softmax (Gumbel 1954; see Maddison,
Tarlow and Minka 2014, https://arxiv.org/abs/1411.0030). The noise is a hash (Philox, Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405) of the request's seed, the position and the token: nothing else enters.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARAMS = tl.constexpr(16)
TEMPERATURE = tl.constexpr(0)
TOP_P = tl.constexpr(1)
MIN_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
TOP_K = tl.constexpr(6)
SEED_LOW = tl.constexpr(7)
SEED_HIGH = tl.constexpr(8)
NUM_PROMPT = tl.constexpr(9)
_PROMPT_BIT = tl.constexpr(1 << 30)


@triton.jit
def _real(settings, slot, which):
    return tl.load(settings + slot * 16 + which).to(tl.float32, bitcast=True)


@triton.jit
def count_kernel(slots, settings, tokens, length, counts, vocab, token_stride, BLOCK: tl.constexpr):
    """Per row how often each token occurs in the output, and bit 30 if it occurs in the prompt."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = _real(settings, slot, 3)
    if (repetition != 1.0) | (_real(settings, slot, 4) != 0.0) | (_real(settings, slot, 5) != 0.0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        valid = i < tl.load(length + slot)
        token = tl.load(tokens + slot * token_stride + i, mask=valid, other=0)
        prompt = i < tl.load(settings + slot * 16 + 9)
        place = counts + row.to(tl.int64) * vocab + token
        tl.atomic_or(place, tl.full([BLOCK], _PROMPT_BIT, tl.int32), mask=valid & prompt)
        tl.atomic_add(place, tl.full([BLOCK], 1, tl.int32), mask=valid & (i >= tl.load(settings + slot * 16 + 9)))


@triton.jit
def penalty_kernel(slots, settings, logits, counts, vocab, BLOCK: tl.constexpr):
    """Repetition (Keskar et al. 2019, https://arxiv.org/abs/1909.05858), then frequency and presence, in place."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = _real(settings, slot, 3)
    frequency = _real(settings, slot, 4)
    presence = _real(settings, slot, 5)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = row.to(tl.int64) * vocab + i
        seen = tl.load(counts + place, mask=i < vocab, other=0)
        x = tl.load(logits + place, mask=i < vocab, other=0.0)
        x = tl.where(seen != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        uses = (seen & (_PROMPT_BIT - 1)).to(tl.float32)
        x = tl.where(uses > 0, x - (uses * frequency + presence), x)
        tl.store(logits + place, x, mask=i < vocab)


@triton.jit
def _ordered(bits):
    """float32 bits <-> int32 of the same order; its own inverse."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _as_float(ordered):
    return _ordered(ordered).to(tl.float32, bitcast=True)


@triton.jit
def _sum_from(row, vocab, floor, peak, temperature, BLOCK: tl.constexpr):
    """How many logits are at least `floor`, and the sum of exp((logit - peak) / temperature) over them."""
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
    """The logits of at least `floor`, in a row of their own, there for all threads of the program."""
    held = 0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        kept = ((x >= floor) & (x > float("-inf"))).to(tl.int32)
        tl.store(target + held + tl.cumsum(kept, 0) - 1, x, mask=kept == 1)
        held += tl.sum(kept, 0)
    tl.debug_barrier()


@triton.jit
def filter_kernel(slots, settings, logits, scratch, floors, last_ties, vocab, BLOCK: tl.constexpr):
    """What min_p, top_k and top_p leave of a row: logits above `floor`, and those equal to it up to an id.

    Each filter looks at what the one before it left; ties go to the lower id. A bisection over the ordered bits of
    float32 finds each floor exactly. It begins on the whole row; once at most `BLOCK` logits are left, among which the
    floors lie for certain, it goes on with those alone, in `scratch` [rows, BLOCK].
    """
    r = tl.program_id(0)
    slot = tl.load(slots + r).to(tl.int64)
    temperature = _real(settings, slot, 0)
    top_p = _real(settings, slot, 1)
    min_p = _real(settings, slot, 2)
    top_k = tl.load(settings + slot * 16 + 6)
    floor = float("-inf")
    last_tie = vocab
    if (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0) | (top_k > 0)):
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
        # Every floor to be found is at least `pivot`: so many logits, or so much weight, lie at or above it.
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
            # The highest floor that at least k logits reach lies in [low, high).
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


@triton.jit
def draw_kernel(
    slots,
    settings,
    length,
    logits,
    floors,
    last_ties,
    part_values,
    part_tokens,
    vocab,
    parts,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one part of one row, noise included where the row is not greedy. NaN and +inf win, as -1."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    temperature = _real(settings, slot, 0)
    if temperature > 0.0:
        if FILTERED:
            floor = tl.load(floors + row)
            kept = (x > floor) | ((x == floor) & (i <= tl.load(last_ties + row)))
            x = tl.where(kept, x, float("-inf"))
        low = tl.load(settings + slot * 16 + 7).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(settings + slot * 16 + 8).to(tl.uint32, bitcast=True).to(tl.uint64)
        position = tl.load(length + slot)
        at = position.to(tl.uint32) + tl.zeros([BLOCK], tl.uint32)
        bits, _, _, _ = tl.philox(low | (high << 32), i.to(tl.uint32), at, 0, 0)
        # Small u, which make large noise, keep all their bits; -log(1 - u) loses them, so it is a series there.
        u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
        u = tl.minimum(u, 0.99999994)
        waiting = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333333)), -tl.log(1.0 - u))
        x = x / temperature - tl.log(waiting)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, vocab), 0)
    tl.store(part_values + row * parts + part, tl.where(bad == 1, float("inf"), best))
    tl.store(part_tokens + row * parts + part, tl.where((bad == 1) | (best == float("-inf")), -1, token))


@triton.jit
def choose_kernel(part_values, part_tokens, sampled, parts, BLOCK: tl.constexpr):
    """The best of a row's parts, the first of equals."""
    row = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    value = tl.load(part_values + row * parts + p, mask=p < parts, other=float("-inf"))
    best = tl.max(value, 0)
    first = tl.min(tl.where((value == best) & (p < parts), p, BLOCK), 0)
    tl.store(sampled + row, tl.load(part_tokens + row * parts + first))
