"""Sums of many rows over GPUs that write to each other's memory, with the residual addition and RMS norm that follow.

A rank stores its rows in the others' memory, which is zeros at first. A receiver reads a row until none of its elements
is zero, and puts the zeros back, so that the link carries neither flags nor fences (the "Lamport" all-reduce of
TensorRT-LLM, https://github.com/NVIDIA/TensorRT-LLM). Rows are sent negated, so 0.0 is sent as -0.0, whose bits are not
zero; so is -0.0.

Room of a rank: two halves, which consecutive launches use in turns, of [ranks - 1, ROOM] bytes for the rows of each
other rank. A rank begins launch n + 2 only after it has received something of the others' launch n + 1, and so after
they have read all of launch n and emptied the room.

Sums are in float32 and in the order of ranks, so all ranks have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.device.launch_sizes import next_power_of_2
from octavo.parallel.triton_peers import begin_row, finish_row

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _rows_from(rooms, rank, of, half, ROOM: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Return where the rows of a rank begin in the room of another one."""
    slot = rank - (rank > of).to(tl.int32)
    start = tl.load(rooms + of) + (half * (RANKS - 1) + slot).to(tl.int64) * ROOM
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _send_row(x, rooms, rank, half, place, valid, ROOM: tl.constexpr, RANKS: tl.constexpr):
    """Store a row in all other ranks' rooms."""
    HALF: tl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16
    BITS: tl.constexpr = tl.int16 if HALF else tl.int32
    SIGN: tl.constexpr = -0x8000 if HALF else -0x80000000
    bits = tl.load(x + place, mask=valid, other=0.0).to(BITS, bitcast=True) ^ SIGN
    bits = tl.where(bits == 0, SIGN, bits)
    for other in tl.static_range(RANKS):
        if other != rank:
            tl.store(_rows_from(rooms, rank, other, half, ROOM, RANKS, BITS) + place, bits, mask=valid)


@triton.jit
def _take_row(there, valid, patience, DTYPE: tl.constexpr):
    """Return a row once all of it has arrived, or as it is after `patience` reads; and empty its place."""
    SIGN: tl.constexpr = -0x8000 if DTYPE.primitive_bitwidth == 16 else -0x80000000
    bits = tl.load(there, mask=valid, other=1, volatile=True)
    late = tl.max((bits == 0).to(tl.int32), 0)
    while (late > 0) & (patience > 0):
        bits = tl.load(there, mask=valid, other=1, volatile=True)
        late = tl.max((bits == 0).to(tl.int32), 0)
        patience -= 1
    tl.store(there, tl.zeros_like(bits), mask=valid)
    return (bits ^ SIGN).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def add_row(x, rooms, rank, half, place, inside, ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum over ranks of a row, after those of others were copied to the room as they are."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    added = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == rank:
            added += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        else:
            there = _rows_from(rooms, other, rank, half, ROOM, RANKS, DTYPE)
            added += tl.load(there + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return added


@triton.jit
def _add_arriving(
    x, rooms, rank, half, place, valid, patience, ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the sum over ranks of a row that the others send."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32
    added = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == rank:
            added += tl.load(x + place, mask=valid, other=0.0).to(tl.float32)
        else:
            there = _rows_from(rooms, other, rank, half, ROOM, RANKS, BITS) + place
            added += _take_row(there, valid, patience, DTYPE)
    return added


@triton.jit(do_not_specialize=["rank", "num_rows", "patience"])
def stored_sum_kernel(
    x,
    rooms,
    turns,
    out,
    residual,
    total,
    weight,
    eps,
    rank,
    num_rows,
    patience,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    NORMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum x [num_rows, WIDTH] over ranks: to `out`; or with NORMS add it to `residual`, which makes `total`, whose norm
    is `out`. Row r is the program's with the number r modulo programs.

    Args:
        rooms: [RANKS] int64, addresses of the ranks' rooms.
        turns: [programs] int32, launches so far. All launches have equally many programs.
        patience: how often a row is read again.
        ROOM: bytes for the rows of each rank, in each half.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    turn = tl.load(turns + program)
    half = turn & 1
    elements = tl.arange(0, BLOCK)
    valid = elements < WIDTH
    if program < num_rows:
        _send_row(x, rooms, rank, half, program.to(tl.int64) * WIDTH + elements, valid, ROOM, RANKS)
    row = program
    while row < num_rows:
        following = row + programs
        if following < num_rows:
            _send_row(x, rooms, rank, half, following.to(tl.int64) * WIDTH + elements, valid, ROOM, RANKS)
        place = row.to(tl.int64) * WIDTH + elements
        held, scale = begin_row(residual, weight, place, elements, valid, NORMS)
        value = _add_arriving(x, rooms, rank, half, place, valid, patience, ROOM, RANKS, BLOCK)
        finish_row(value, held, scale, place, valid, out, total, eps, WIDTH, NORMS)
        row = following
    tl.store(turns + program, turn + 1)


def launch(
    x: Tensor,
    rooms: Tensor,
    turns: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    *,
    rank: int,
    room: int,
    patience: int = 0x7FFFFFFF,
    overlaps: bool = False,
) -> None:
    """Launch `stored_sum_kernel` for x [T, H], contiguous, of at most `room` bytes.

    Args:
        norm: residual, total, weight and epsilon; None for sums alone.
    """
    rows, width = x.shape
    residual, total, weight, eps = (x, x, x, 0.0) if norm is None else norm
    block = next_power_of_2(width)
    stored_sum_kernel[(len(turns),)](
        x,
        rooms,
        turns,
        out,
        residual,
        total,
        weight,
        eps,
        rank,
        rows,
        patience,
        WIDTH=width,
        BLOCK=block,
        ROOM=room,
        RANKS=len(rooms),
        NORMS=norm is not None,
        OVERLAPS=overlaps,
        num_warps=max(1, min(8, block // 256)),
        **({"launch_pdl": True} if overlaps else {}),
    )
