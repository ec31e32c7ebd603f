"""Sums over GPUs that write to each other's memory, with the residual addition and RMS norm that follow.

A rank sends 32-bit words as cells of 64 bits: the number of the exchange, and the word. A receiver reads a cell until
it has the number of its own exchange, so data and signal travel together, without fences or separate flags (the "LL"
protocol of NCCL, https://github.com/NVIDIA/nccl). Each program counts its own exchanges, in device memory, so that a
recorded launch can be replayed. A program waits only for those of the same number on the other ranks.

Inbox of a rank, in cells: [programs, 2, ranks + 1, SLOT]. Consecutive exchanges take turns between the two halves: a
rank sends exchange n + 2 only after all others have sent n + 1, and so have read n.

In one shot, every rank sends its rows to all, and each adds them up. In two shots, rank r adds up the r-th part of each
row, and sends the sum to all: fewer bytes, but one more way. Sums are in float32 and in the order of ranks, so all
ranks have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.device.launch_sizes import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _inbox(inboxes, rank):
    """Return the cells of a rank's inbox. Without the alignment, cells would be sent one by one."""
    return tl.multiple_of(tl.load(inboxes + rank).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def _receive(cells, mask, number, patience):
    """Return the words of cells once all have the number; whatever there is after `patience` reads."""
    found = tl.load(cells, mask=mask, other=0, volatile=True)
    late = tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32) * mask.to(tl.int32), 0)
    while (late > 0) & (patience > 0):
        found = tl.load(cells, mask=mask, other=0, volatile=True)
        late = tl.max(((found >> 32).to(tl.int32) != number).to(tl.int32) * mask.to(tl.int32), 0)
        patience -= 1
    return found.to(tl.int32)


@triton.jit
def _half(words, DTYPE: tl.constexpr):
    """Return the lower 16 bits as a float of DTYPE, in float32."""
    return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(values, DTYPE: tl.constexpr):
    """Return float32 values, rounded to a DTYPE of 16 bits, as the lower half of a word."""
    return values.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _send(inboxes, start, places, words, mask, number, RANKS: tl.constexpr, PART: tl.constexpr):
    """Send words to all ranks; or with PART, to each those of its part."""
    cells = (number.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(RANKS):
        if PART == 0:
            tl.store(_inbox(inboxes, rank) + start + places, cells, mask=mask)
        else:
            tl.store(_inbox(inboxes, rank) + start + places - rank * PART, cells, mask=mask & (places // PART == rank))


@triton.jit
def _add_up(slots, places, mask, number, patience, SLOT, RANKS: tl.constexpr, DTYPE: tl.constexpr, EACH: tl.constexpr):
    """Return the sums over ranks of the first and the second element of each word; the same if it has only one."""
    words = _receive(slots + places, mask, number, patience)
    first = words.to(tl.float32, bitcast=True) if EACH == 1 else _half(words, DTYPE)
    second = first if EACH == 1 else _half(words >> 16, DTYPE)
    for rank in tl.static_range(1, RANKS):
        words = _receive(slots + rank * SLOT + places, mask, number, patience)
        first += words.to(tl.float32, bitcast=True) if EACH == 1 else _half(words, DTYPE)
        second = first if EACH == 1 else second + _half(words >> 16, DTYPE)
    return first, second


@triton.jit
def _packed(first, second, DTYPE: tl.constexpr, EACH: tl.constexpr):
    """Return elements as words, rounded."""
    return first.to(tl.int32, bitcast=True) if EACH == 1 else _bits(first, DTYPE) | (_bits(second, DTYPE) << 16)


@triton.jit
def begin_row(residual, weight, start, elements, valid, NORMS: tl.constexpr):
    """Return what `finish_row` needs of a row's residual and of the norm's weights; called while the row is awaited."""
    if NORMS:
        held = tl.load(residual + start, mask=valid, other=0.0).to(tl.float32)
        scale = tl.load(weight + elements, mask=valid, other=0.0).to(tl.float32)
    else:
        held = 0.0
        scale = 0.0
    return held, scale


@triton.jit
def finish_row(value, held, scale, start, valid, out, total, eps, WIDTH, NORMS: tl.constexpr):
    """Store a row's sums; or add them to the residual, and store that and its norm."""
    if NORMS:
        rounded = (value + held).to(total.dtype.element_ty)
        tl.store(total + start, rounded, mask=valid)
        wide = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        value = wide * inverse * scale
    tl.store(out + start, value.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rank", "num_rows", "size", "patience"])  # one variant for all ranks and sizes
def exchange_kernel(
    x,
    inboxes,
    counts,
    out,
    residual,
    total,
    weight,
    eps,
    rank,
    num_rows,
    size,
    patience,
    WORDS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    RANKS: tl.constexpr,
    SHOTS: tl.constexpr,
    GATHERS: tl.constexpr,
    NORMS: tl.constexpr,
    RAGGED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum x [num_rows, WORDS words] over ranks: to `out`; or with NORMS add it to `residual`, which makes `total`,
    whose norm is `out`. With GATHERS store all ranks' x in `out` [RANKS, num_rows, WORDS], as words. With RAGGED the
    last row has fewer words: x has `size`, and so has each rank's part of a gathered `out`.

    Args:
        inboxes: [RANKS] int64, addresses of the ranks' inboxes.
        counts: [programs] int32, exchanges of each program so far.
        patience: how often a cell is read again.
        EACH: elements of a word.
        PART: words of a row that a rank adds up in two shots. PART_BLOCK, BLOCK: powers of two that hold PART, WORDS.
        SHOTS: 1 or 2.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    words, parts, elements = tl.arange(0, BLOCK), tl.arange(0, PART_BLOCK), tl.arange(0, BLOCK * EACH)
    number = tl.load(counts + program)
    row = program
    while row < num_rows:
        number += 1
        # Without RAGGED the masks are constants, so that words are loaded and sent several at a time.
        extent = tl.minimum(size - row * WORDS, WORDS) if RAGGED else WORDS
        in_row, valid = words < extent, elements < extent * EACH
        half = (program * 2 + (number & 1)).to(tl.int64) * ((RANKS + 1) * SLOT)
        own = tl.load(x.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * WORDS + words, mask=in_row, other=0)
        _send(inboxes, half + rank * SLOT, words, own, in_row, number, RANKS, PART if SHOTS == 2 else 0)
        mine = _inbox(inboxes, rank) + half
        start = row.to(tl.int64) * (WORDS * EACH) + elements
        held, scale = begin_row(residual, weight, start, elements, valid, NORMS)
        if SHOTS == 2:
            place = rank * PART + parts
            here = (parts < PART) & (place < extent)
            first, second = _add_up(mine, parts, here, number, patience, SLOT, RANKS, DTYPE, EACH)
            summed = _packed(first, second, DTYPE, EACH)
            _send(inboxes, half + RANKS * SLOT, place, summed, here, number, RANKS, 0)
        if GATHERS:
            for other in tl.static_range(RANKS):
                found = _receive(mine + other * SLOT + words, in_row, number, patience)
                target = (other * num_rows + row).to(tl.int64) * WORDS
                if RAGGED:
                    target = other * size.to(tl.int64) + row * WORDS
                tl.store(out + target + words, found, mask=in_row)
        else:
            if SHOTS == 1:
                first, second = _add_up(mine, words, in_row, number, patience, SLOT, RANKS, DTYPE, EACH)
            else:
                first, second = _add_up(mine + RANKS * SLOT, words, in_row, number, patience, SLOT, 1, DTYPE, EACH)
            value = first if EACH == 1 else tl.interleave(first, second)
            finish_row(value, held, scale, start, valid, out, total, eps, WORDS * EACH, NORMS)
        row += tl.num_programs(0)
    tl.debug_barrier()
    tl.store(counts + program, number)


def launch(
    x: Tensor,
    inboxes: Tensor,
    counts: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    *,
    rank: int,
    words: int,
    slot: int,
    two_shots: bool = False,
    gathers: bool = False,
    patience: int = 0x7FFFFFFF,
    overlaps: bool = False,
) -> None:
    """Launch `exchange_kernel` for x, contiguous, in rows of `words` 32-bit words, at most `slot`. Without a norm, the
    last row may be shorter.

    Args:
        norm: residual, total, weight and epsilon; None for sums alone.
        two_shots: the words of a row must be at least the number of ranks.
    """
    ranks = len(inboxes)
    size = x.numel() * x.element_size() // 4
    rows = -(-size // words)
    part = -(-words // ranks)
    residual, total, weight, eps = (x, x, x, 0.0) if norm is None else norm
    block = next_power_of_2(words)
    exchange_kernel[(max(1, min(rows, len(counts))),)](
        x,
        inboxes,
        counts,
        out,
        residual,
        total,
        weight,
        eps,
        rank,
        rows,
        size,
        patience,
        WORDS=words,
        EACH=4 // x.element_size(),
        BLOCK=block,
        PART=part,
        PART_BLOCK=next_power_of_2(part),
        SLOT=slot,
        RANKS=ranks,
        SHOTS=2 if two_shots else 1,
        GATHERS=gathers,
        NORMS=norm is not None,
        RAGGED=size % words > 0,
        OVERLAPS=overlaps,
        num_warps=max(1, min(16, block // 128)),
        **({"launch_pdl": True} if overlaps else {}),
    )
