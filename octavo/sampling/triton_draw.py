"""Sampling on a GPU without sorting: penalties by counts, thresholds by bisection, the draw by Gumbel noise.

The token that maximizes logit / temperature + Gumbel noise is a sample from the softmax (Gumbel 1954; see Maddison,
Tarlow and Minka 2014, https://arxiv.org/abs/1411.0030). The noise is a hash (Philox, Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405) of the request's seed, the position and the token: nothing else enters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.sampling.parameters import NUM_PARAMS, OFFSETS

_WORDS = tl.constexpr(NUM_PARAMS)
TEMPERATURE = tl.constexpr(OFFSETS["temperature"])
TOP_P = tl.constexpr(OFFSETS["top_p"])
MIN_P = tl.constexpr(OFFSETS["min_p"])
REPETITION = tl.constexpr(OFFSETS["repetition"])
FREQUENCY = tl.constexpr(OFFSETS["frequency"])
PRESENCE = tl.constexpr(OFFSETS["presence"])
SEED = tl.constexpr(OFFSETS["seed"])
TOP_K = tl.constexpr(OFFSETS["top_k"])
NUM_PROMPT = tl.constexpr(OFFSETS["num_prompt"])
_PROMPT_BIT = tl.constexpr(1 << 30)


@triton.jit
def whole(settings, slot, which):
    """Load an integer parameter of a slot by its offset."""
    return tl.load(settings + slot * _WORDS + which)


@triton.jit
def real(settings, slot, which):
    """Load a float32 parameter of a slot by its offset."""
    return whole(settings, slot, which).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["token_stride"])
def count_kernel(slots, settings, tokens, length, counts, vocab, token_stride, BLOCK: tl.constexpr):
    """Count each token's occurrences in each row's output; set bit 30 if it is in the prompt; skip -1."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = real(settings, slot, REPETITION)
    if (repetition != 1.0) | (real(settings, slot, FREQUENCY) != 0.0) | (real(settings, slot, PRESENCE) != 0.0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        valid = i < tl.load(length + slot)
        token = tl.load(tokens + slot * token_stride + i, mask=valid, other=0)
        valid = valid & (token >= 0)
        prompt = i < whole(settings, slot, NUM_PROMPT)
        place = counts + row.to(tl.int64) * vocab + token
        tl.atomic_or(place, tl.full([BLOCK], _PROMPT_BIT, tl.int32), mask=valid & prompt)
        tl.atomic_add(place, tl.full([BLOCK], 1, tl.int32), mask=valid & (i >= whole(settings, slot, NUM_PROMPT)))


@triton.jit(do_not_specialize=["token_stride"])
def penalty_kernel(slots, settings, tokens, length, counts, logits, vocab, token_stride, BLOCK: tl.constexpr):
    """Repetition (Keskar et al. 2019, https://arxiv.org/abs/1909.05858), then frequency and presence, in place.

    Only a row's own tokens are touched. An atomic exchange with 0 gives the count to one of a token's positions, so
    that each token is penalized once and `counts` is all zero again afterwards.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = real(settings, slot, REPETITION)
    frequency = real(settings, slot, FREQUENCY)
    presence = real(settings, slot, PRESENCE)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        valid = i < tl.load(length + slot)
        token = tl.load(tokens + slot * token_stride + i, mask=valid, other=0)
        valid = valid & (token >= 0)
        place = row.to(tl.int64) * vocab + token
        seen = tl.atomic_xchg(counts + place, tl.zeros([BLOCK], tl.int32), mask=valid)
        first = valid & (seen != 0)
        x = tl.load(logits + place, mask=first, other=0.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        uses = (seen & (_PROMPT_BIT - 1)).to(tl.float32)
        x = tl.where(uses > 0, x - (uses * frequency + presence), x)
        tl.store(logits + place, x, mask=first)


@triton.jit
def noise(settings, length, slot, i):
    """Return the Gumbel noise of tokens `i` at the row's next position."""
    low = whole(settings, slot, SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = whole(settings, slot, SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    at = tl.load(length + slot).to(tl.uint32) + tl.zeros_like(i).to(tl.uint32)
    bits, _, _, _ = tl.philox(low | (high << 32), i.to(tl.uint32), at, 0, 0)
    # Small u, which give large noise, keep all their bits; -log(1 - u) would lose them, so a series replaces it.
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    waiting = tl.where(u < 1e-3, u * (1.0 + u * (0.5 + u * 0.33333333)), -tl.log(1.0 - u))
    return -tl.log(waiting)


@triton.jit
def _possible(which, words, word_stride, row, i, valid):
    """Return whether tokens `i` are allowed in a row; see `ResidentAllowed`."""
    mask = tl.load(which + row)
    place = words + mask.to(tl.int64) * word_stride + i // 32
    word = tl.load(place, mask=valid & (mask >= 0), other=-1)
    return ((word >> (i % 32)) & 1) == 1


@triton.jit
def forbid_kernel(which, words, logits, vocab, word_stride, BLOCK: tl.constexpr):
    """Set forbidden tokens' logits to minus infinity, in place."""
    row = tl.program_id(0)
    if tl.load(which + row) >= 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        out = ~_possible(which, words, word_stride, row, i, i < vocab)
        tl.store(logits + row.to(tl.int64) * vocab + i, float("-inf"), mask=out & (i < vocab))


@triton.jit
def draw_kernel(
    slots,
    settings,
    length,
    which,
    words,
    logits,
    floors,
    last_ties,
    drawn,
    part_values,
    part_tokens,
    vocab,
    first,
    parts,
    word_stride,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the best allowed token of one part of one row, with noise unless the row is greedy. NaN and +inf win, as
    -1. The `vocab` logits of a row are those of the tokens from `first` on.

    Rows whose token was `drawn` by the filter kernel (otherwise -2) are skipped.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    place = part * BLOCK + tl.arange(0, BLOCK)
    i = first + place
    if FILTERED:  # noqa: SIM102 (decided at compile time)
        if tl.load(drawn + row) >= -1:
            return
    x = tl.load(logits + row.to(tl.int64) * vocab + place, mask=place < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(_possible(which, words, word_stride, row, i, place < vocab), x, float("-inf"))
    bad = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    temperature = real(settings, slot, TEMPERATURE)
    if temperature > 0.0:
        if FILTERED:
            floor = tl.load(floors + row)
            kept = (x > floor) | ((x == floor) & (i <= tl.load(last_ties + row)))
            x = tl.where(kept, x, float("-inf"))
        x = x / temperature + noise(settings, length, slot, i)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, i, first + vocab), 0)
    tl.store(part_values + row * parts + part, tl.where(bad == 1, float("inf"), best))
    tl.store(part_tokens + row * parts + part, tl.where((bad == 1) | (best == float("-inf")), -1, token))


@triton.jit
def choose_kernel(part_values, part_tokens, drawn, sampled, parts, FILTERED: tl.constexpr, BLOCK: tl.constexpr):
    """Choose the best of a row's parts, the first of ties."""
    row = tl.program_id(0)
    if FILTERED:
        token = tl.load(drawn + row)
        if token >= -1:
            tl.store(sampled + row, token)
            return
    p = tl.arange(0, BLOCK)
    value = tl.load(part_values + row * parts + p, mask=p < parts, other=float("-inf"))
    best = tl.max(value, 0)
    first = tl.min(tl.where((value == best) & (p < parts), p, BLOCK), 0)
    tl.store(sampled + row, tl.load(part_tokens + row * parts + first))
