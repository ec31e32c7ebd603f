"""Sums of many rows over GPUs that write to each other's memory, with the residual addition and RMS norm that follow.

A rank stores its rows in the others' memory, then a flag for each group of rows; a receiver waits for the flag, and
adds up. Half of the bytes of `triton_peers.py`, whose every word carries its own signal, cross the link, but a flag
waits until the rows before it have arrived: so this is for rows that take longer than that.

Room of a rank: two halves, which consecutive launches use in turns, of [ranks - 1, ROOM] bytes for the rows of each
other rank; then flags, [2, ranks - 1, programs, GROUPS] int32, the number of the launch. A rank begins launch n + 2
only after it has received something of the others' launch n + 1, and so after they have read all of launch n.

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

_ROWS_OF_A_GROUP = 2
"""At least. A program sends a group while the one before is on its way."""


@triton.jit
def _acquire(flag, ON_GPU: tl.constexpr):
    """Return the flag; what its writer stored before it can be read then."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [flag.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(flag, volatile=True)


@triton.jit
def _slot(rank, of):
    """Return the place of a rank's rows in the room of another one."""
    return rank - (rank > of).to(tl.int32)


@triton.jit
def _rows_from(rooms, rank, of, half, ROOM: tl.constexpr, RANKS: tl.constexpr, DTYPE: tl.constexpr):
    """Return where the rows of a rank begin in the room of another one."""
    start = tl.load(rooms + of) + (half * (RANKS - 1) + _slot(rank, of)).to(tl.int64) * ROOM
    return tl.multiple_of(start.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _flags_from(rooms, rank, of, half, program, ROOM: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr):
    """Return the flags of a rank's program in the room of another rank."""
    flags = (tl.load(rooms + of) + 2 * (RANKS - 1) * ROOM).to(tl.pointer_type(tl.int32))
    return flags + ((half * (RANKS - 1) + _slot(rank, of)) * tl.num_programs(0) + program) * GROUPS


@triton.jit
def _send_group(
    x,
    rooms,
    rank,
    half,
    number,
    group,
    each,
    num_rows,
    elements,
    valid,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Store the rows of this program's group in all other ranks' rooms, and then the flag."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    DTYPE: tl.constexpr = x.dtype.element_ty
    first = group * each
    for at in range(first, first + each):
        row = at * programs + program
        place = row.to(tl.int64) * WIDTH + elements
        inside = valid & (row < num_rows)
        value = tl.load(x + place, mask=inside, other=0.0)
        for other in tl.static_range(RANKS):
            if other != rank:
                tl.store(_rows_from(rooms, rank, other, half, ROOM, RANKS, DTYPE) + place, value, mask=inside)
    tl.debug_barrier()
    for other in tl.static_range(RANKS):
        if other != rank:
            flag = _flags_from(rooms, rank, other, half, program, ROOM, RANKS, GROUPS) + group
            tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def _await_group(
    rooms,
    rank,
    half,
    number,
    group,
    patience,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Wait until all other ranks have stored the rows of this program's group, for at most `patience` reads."""
    for other in tl.static_range(RANKS):
        if other != rank:
            flag = _flags_from(rooms, other, rank, half, tl.program_id(0), ROOM, RANKS, GROUPS) + group
            found = _acquire(flag, ON_GPU)
            while (found != number) & (patience > 0):
                found = _acquire(flag, ON_GPU)
                patience -= 1


@triton.jit
def add_row(x, rooms, rank, half, place, inside, ROOM: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum over ranks of a row."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    added = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(RANKS):
        if other == rank:
            added += tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        else:
            there = _rows_from(rooms, other, rank, half, ROOM, RANKS, DTYPE)
            added += tl.load(there + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return added


@triton.jit(do_not_specialize=["rank", "num_rows", "each", "patience"])
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
    each,
    patience,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    GROUPS: tl.constexpr,
    NORMS: tl.constexpr,
    ON_GPU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum x [num_rows, WIDTH] over ranks: to `out`; or with NORMS add it to `residual`, which makes `total`, whose norm
    is `out`. Row r is the program's with the number r modulo programs.

    Args:
        rooms: [RANKS] int64, addresses of the ranks' rooms.
        turns: [programs] int32, launches so far. All launches have equally many programs.
        each: rows of a program in a group; the rows of all programs have at most GROUPS groups.
        patience: how often a flag is read again.
        ROOM: bytes for the rows of each rank, in each half.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    number = tl.load(turns + program) + 1
    half = number & 1
    elements = tl.arange(0, BLOCK)
    valid = elements < WIDTH
    mine = tl.cdiv(tl.maximum(num_rows - program, 0), programs)
    groups = tl.cdiv(mine, each)
    if groups > 0:
        _send_group(x, rooms, rank, half, number, 0, each, num_rows, elements, valid, WIDTH, ROOM, RANKS, GROUPS)
    for group in range(groups):
        if group + 1 < groups:
            _send_group(
                x, rooms, rank, half, number, group + 1, each, num_rows, elements, valid, WIDTH, ROOM, RANKS, GROUPS
            )
        _await_group(rooms, rank, half, number, group, patience, ROOM, RANKS, GROUPS, ON_GPU)
        for at in range(group * each, tl.minimum(group * each + each, mine)):
            place = (at * programs + program).to(tl.int64) * WIDTH + elements
            held, scale = begin_row(residual, weight, place, elements, valid, NORMS)
            value = add_row(x, rooms, rank, half, place, valid, ROOM, RANKS, BLOCK)
            finish_row(value, held, scale, place, valid, out, total, eps, WIDTH, NORMS)
    tl.debug_barrier()
    tl.store(turns + program, number)


def launch(
    x: Tensor,
    rooms: Tensor,
    turns: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    *,
    rank: int,
    room: int,
    groups: int,
    patience: int = 0x7FFFFFFF,
    overlaps: bool = False,
) -> None:
    """Launch `stored_sum_kernel` for x [T, H], contiguous, of at most `room` bytes.

    Args:
        norm: residual, total, weight and epsilon; None for sums alone.
    """
    rows, width = x.shape
    programs = len(turns)
    mine = -(-rows // programs)
    residual, total, weight, eps = (x, x, x, 0.0) if norm is None else norm
    block = next_power_of_2(width)
    stored_sum_kernel[(programs,)](
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
        max(_ROWS_OF_A_GROUP, -(-mine // groups)),
        patience,
        WIDTH=width,
        BLOCK=block,
        ROOM=room,
        RANKS=len(rooms),
        GROUPS=groups,
        NORMS=norm is not None,
        ON_GPU=x.is_cuda,
        OVERLAPS=overlaps,
        num_warps=max(1, min(8, block // 256)),
        **({"launch_pdl": True} if overlaps else {}),
    )
