"""Kernels that choose experts and sort tokens by expert, launched by `expert_routing.py` and `expert_products.py`.

Nothing is read on the host: the products of experts get a list of tiles of a size that no choice exceeds, whose last
entries may be empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.nn.ops.triton_overlap import follow

_LEAST = tl.constexpr(-3.0e38)
"""Logit and score of an expert whose own is -inf or NaN; less have only those that can't be chosen."""


@triton.jit
def _best(choice, column, COLUMNS: tl.constexpr):
    """Return the largest of each row as (value, column); the first one of equal ones."""
    best = tl.max(choice, 1)
    where = tl.min(tl.where(choice == best[:, None], column, COLUMNS - 1), 1)
    return best, where


@triton.jit
def _within_groups(
    choice,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
):
    """Return the scores with -inf for experts outside the best groups of SIZE adjacent experts."""
    group = tl.arange(0, GROUPS_PADDED)[None, :]
    scores = tl.full([ROWS, GROUPS_PADDED], float("-inf"), tl.float32)
    for g in range(GROUPS):
        inside = tl.where(column // SIZE == g, choice, float("-inf"))
        best, first = _best(inside, column, COLUMNS)
        if SUMS_TWO:
            second, _ = _best(tl.where(column == first[:, None], float("-inf"), inside), column, COLUMNS)
            best += second
        scores = tl.where(group == g, tl.maximum(best, _LEAST)[:, None], scores)
    allowed = tl.zeros([ROWS, COLUMNS], tl.int32)
    for _ in range(TOP_GROUPS):
        _, chosen = _best(scores, group, GROUPS_PADDED)
        allowed = tl.where(column // SIZE == chosen[:, None], 1, allowed)
        scores = tl.where(group == chosen[:, None], float("-inf"), scores)
    return tl.where(allowed == 1, choice, float("-inf"))


@triton.jit
def scores(logit, is_expert, AXIS: tl.constexpr, SCORES: tl.constexpr):
    """Return the scores of float32 logits along an axis; "chosen" and "mixer" begin with the logits themselves."""
    logit = tl.where(logit > _LEAST, tl.minimum(logit, -_LEAST), _LEAST)
    logit = tl.where(is_expert, logit, float("-inf"))
    if SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORES == "softmax":
        raised = tl.exp(logit - tl.max(logit, AXIS, keep_dims=True))
        score = raised / tl.sum(raised, AXIS, keep_dims=True)
    else:
        score = logit
    return score


@triton.jit
def ranked(choice, is_expert):
    """Return scores in which columns without an expert have the lowest value."""
    return tl.where(is_expert, tl.where(choice > _LEAST, choice, _LEAST), float("-inf"))


@triton.jit
def choose(
    logits,
    correction,
    first,
    T,
    scaling,
    floor,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    """Choose the experts of ROWS tokens from `first` on; return their weights and numbers, both [ROWS, SLOTS]."""
    row = first + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    valid = (row < T)[:, None] & (column < E)
    logit = tl.load(logits + row.to(tl.int64)[:, None] * E + column, mask=valid, other=0.0).to(tl.float32)
    score = scores(logit, column < E, 1, SCORES)
    choice = score
    if CORRECTED:
        choice += tl.load(correction + column, mask=column < E, other=0.0)
    choice = ranked(choice, column < E)
    if GROUPS > 1:
        choice = _within_groups(choice, column, ROWS, COLUMNS, E // GROUPS, GROUPS, GROUPS_PADDED, TOP_GROUPS, SUMS_TWO)
    slot = tl.arange(0, SLOTS)[None, :]
    weights = tl.full([ROWS, SLOTS], float("-inf") if SCORES == "chosen" else 0.0, tl.float32)
    experts = tl.zeros([ROWS, SLOTS], tl.int32)
    for k in range(K):
        _, chosen = _best(choice, column, E)
        taken = column == chosen[:, None]
        weight = tl.sum(tl.where(taken, score, 0.0), 1)
        weights = tl.where(slot == k, weight[:, None], weights)
        experts = tl.where(slot == k, chosen[:, None], experts)
        choice = tl.where(taken, float("-inf"), choice)
    if SCORES == "chosen":
        raised = tl.exp(weights - tl.max(weights, 1)[:, None])
        weights = raised / tl.sum(raised, 1)[:, None]
    if NORMALIZED:
        weights = weights / tl.maximum(tl.sum(weights, 1), floor)[:, None]
    return weights * scaling, experts


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits,
    correction,
    weights,
    experts,
    counts,
    T,
    scaling,
    floor,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    NORMALIZED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the experts of ROWS tokens, and count how many chose each: counts [programs, COLUMNS]."""
    follow(OVERLAPS)
    first = tl.program_id(0) * ROWS
    chosen_weights, chosen = choose(
        logits,
        correction,
        first,
        T,
        scaling,
        floor,
        E,
        COLUMNS,
        K,
        SLOTS,
        ROWS,
        SCORES,
        CORRECTED,
        GROUPS,
        GROUPS_PADDED,
        TOP_GROUPS,
        SUMS_TWO,
        NORMALIZED,
    )
    row, slot = first + tl.arange(0, ROWS)[:, None], tl.arange(0, SLOTS)[None, :]
    valid = (row < T) & (slot < K)
    place = row * K + slot
    tl.store(weights + place, chosen_weights, mask=valid)
    tl.store(experts + place, chosen, mask=valid)
    count = tl.histogram(tl.reshape(chosen, [ROWS * SLOTS]), COLUMNS, mask=tl.reshape(valid, [ROWS * SLOTS]))
    tl.store(counts + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), count)


@triton.jit
def route_row_kernel(
    logits,
    correction,
    weights,
    experts,
    scaling,
    floor,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    SCORES: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the experts of a single token: those with fewer than K better ones, all compared at once."""
    follow(OVERLAPS)
    column = tl.arange(0, COLUMNS)
    is_expert = column < E
    logit = tl.load(logits + column, mask=is_expert, other=0.0).to(tl.float32)
    score = scores(logit, is_expert, 0, SCORES)
    choice = score
    if CORRECTED:
        choice += tl.load(correction + column, mask=is_expert, other=0.0)
    choice = ranked(choice, is_expert)
    other = tl.reshape(choice, [1, COLUMNS])
    own = tl.reshape(choice, [COLUMNS, 1])
    before = tl.arange(0, COLUMNS)[None, :] < tl.arange(0, COLUMNS)[:, None]
    rank = tl.sum(((other > own) | ((other == own) & before)).to(tl.int32), 1)
    chosen = rank < K
    weight = score
    if SCORES == "chosen":
        raised = tl.where(chosen, tl.exp(score - tl.max(score, 0)), 0.0)
        weight = raised / tl.sum(raised, 0)
    if NORMALIZED:
        weight = weight / tl.maximum(tl.sum(tl.where(chosen, weight, 0.0), 0), floor)
    tl.store(weights + rank, weight * scaling, mask=chosen)
    tl.store(experts + rank, column, mask=chosen)


@triton.jit(do_not_specialize=["P"])
def count_kernel(
    experts, counts, P, CHUNK: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Count how many of CHUNK choices are each expert, as `route_kernel` does."""
    follow(OVERLAPS)
    i = tl.arange(0, PADDED)
    place = tl.program_id(0) * CHUNK + i
    valid = (i < CHUNK) & (place < P)
    chosen = tl.load(experts + place, mask=valid, other=0)
    tl.store(counts + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.histogram(chosen, COLUMNS, mask=valid))


@triton.jit(do_not_specialize=["P", "chunks", "num_tiles", "begin"])
def sort_kernel(
    experts,
    counts,
    order,
    tiles,
    P,
    chunks,
    num_tiles,
    begin,
    OWNED: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Place one chunk of choices in the order of experts, each expert's in the order of tokens; write some tiles.

    Choices of experts outside [begin, begin + OWNED) get no place. A tile is (expert - begin, first place, number of
    places), of at most HEIGHT places; tiles after the last have number 0.
    """
    follow(OVERLAPS)
    STEP: tl.constexpr = 32
    chunk = tl.program_id(0)
    expert = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    before = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, chunks, STEP):
        each = (first + tl.arange(0, STEP))[:, None]
        count = tl.load(counts + each * COLUMNS + expert[None, :], mask=each < chunks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(each < chunk, count, 0), 0)
    owned = (expert >= begin) & (expert < begin + OWNED)
    total = tl.where(owned, total, 0)
    offset = tl.cumsum(total, 0) - total
    own = tl.load(counts + chunk * COLUMNS + expert)
    i = tl.arange(0, PADDED)
    valid = (i < CHUNK) & (chunk * CHUNK + i < P)
    chosen = tl.load(experts + chunk * CHUNK + i, mask=valid, other=COLUMNS)
    ordered = tl.sort(chosen * PADDED + i)  # without a choice: at the end
    chosen = ordered // PADDED
    mine = (chosen >= begin) & (chosen < begin + OWNED)
    base = offset + before - (tl.cumsum(own, 0) - own)
    position = tl.gather(base, tl.minimum(chosen, COLUMNS - 1), 0) + i
    tl.store(order + position, chunk * CHUNK + ordered % PADDED, mask=mine)
    _list_tiles(tiles, total, offset, P, chunk, chunks, num_tiles, begin, COLUMNS, HEIGHT)


@triton.jit
def _list_tiles(
    tiles, total, offset, P, program, programs, num_tiles, begin, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr
):
    """Write this program's share of the tiles of experts with `total` choices each, the first at `offset`; P choices in
    all."""
    expert = tl.arange(0, COLUMNS)
    of_expert = (total + HEIGHT - 1) // HEIGHT
    its_first = tl.cumsum(of_expert, 0) - of_expert
    for nth in range(program, tl.cdiv(P, HEIGHT), programs):
        target, within = tiles + 3 * (its_first + nth), nth * HEIGHT
        tl.store(target, expert - begin, mask=nth < of_expert)
        tl.store(target + 1, offset + within, mask=nth < of_expert)
        tl.store(target + 2, tl.minimum(total - within, HEIGHT), mask=nth < of_expert)
    for first in range(tl.sum(of_expert, 0) + program * COLUMNS, num_tiles, programs * COLUMNS):
        for field in tl.static_range(3):
            tl.store(tiles + 3 * (first + expert) + field, 0, mask=first + expert < num_tiles)


@triton.jit(do_not_specialize=["P", "chunks", "num_tiles", "begin"])
def scan_kernel(
    counts,
    places,
    tiles,
    P,
    chunks,
    num_tiles,
    begin,
    OWNED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    STEP: tl.constexpr,
    OWN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The first half of `sort_kernel` for many chunks, where few programs read all counts: store the place of each
    expert's first choice in OWN chunks, in places [chunks, COLUMNS]; write some tiles.

    Args:
        STEP: chunks whose counts are read at once.
    """
    follow(OVERLAPS)
    own = tl.program_id(0) * OWN
    expert = tl.arange(0, COLUMNS)
    all_counts = tl.zeros([STEP, COLUMNS], tl.int32)
    earlier = tl.zeros([STEP, COLUMNS], tl.int32)
    for first in range(0, chunks, STEP):
        each = (first + tl.arange(0, STEP))[:, None]
        # With a mask, the compiler has fewer loads in flight.
        count = tl.load(counts + tl.minimum(each, chunks - 1) * COLUMNS + expert[None, :])
        all_counts += tl.where(each < chunks, count, 0)
        earlier += tl.where(each < own, count, 0)
    total = tl.where((expert >= begin) & (expert < begin + OWNED), tl.sum(all_counts, 0), 0)
    offset = tl.cumsum(total, 0) - total
    chunk = (own + tl.arange(0, OWN))[:, None]
    count = tl.load(counts + chunk * COLUMNS + expert[None, :], mask=chunk < chunks, other=0)
    place = (offset + tl.sum(earlier, 0))[None, :] + tl.cumsum(count, 0) - count
    tl.store(places + chunk * COLUMNS + expert[None, :], place, mask=chunk < chunks)
    _list_tiles(tiles, total, offset, P, tl.program_id(0), tl.num_programs(0), num_tiles, begin, COLUMNS, HEIGHT)


@triton.jit(do_not_specialize=["P", "begin"])
def place_kernel(
    experts,
    places,
    order,
    P,
    begin,
    OWNED: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The second half: place one chunk of choices.

    Args:
        places: of `scan_kernel`.
        WIDTH: number of choices compared per iteration; divides the choices of a token.
    """
    follow(OVERLAPS)
    start = tl.program_id(0) * CHUNK
    count = tl.minimum(P - start, CHUNK)
    i = tl.arange(0, PADDED)
    chosen = tl.load(experts + start + i, mask=i < count, other=-1)
    mine = (chosen >= begin) & (chosen < begin + OWNED)
    place = tl.load(places + tl.program_id(0) * COLUMNS + chosen, mask=mine, other=0)
    same = tl.zeros([WIDTH, PADDED], tl.int32)  # a choice in each column: a thread adds up what it has compared
    for first in range(0, count, WIDTH):
        j = first + tl.arange(0, WIDTH)
        other = tl.load(experts + start + j)
        same += ((chosen[None, :] == other[:, None]) & (j[:, None] < i[None, :])).to(tl.int32)
    tl.store(order + place + tl.sum(same, 0), start + i, mask=mine)
