"""The last step of sums whose rows copy engines have moved: the addition, with the residual addition and RMS norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import next_power_of_2
from octavo.parallel.triton_peers import begin_row, finish_row
from octavo.parallel.triton_stores import add_row

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["rank", "slot"])
def copied_sum_kernel(
    x,
    rooms,
    out,
    residual,
    total,
    weight,
    eps,
    rank,
    slot,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    RANKS: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Sum row `program` of x [rows, WIDTH] and of the others' rows in a slot of this rank's room: to `out`; or with
    NORMS add it to `residual`, which makes `total`, whose norm is `out`.

    Args:
        rooms: [RANKS] int64, addresses of the ranks' rooms: slots of [RANKS - 1, ROOM] bytes.
    """
    elements = tl.arange(0, BLOCK)
    valid = elements < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + elements
    held, scale = begin_row(residual, weight, place, elements, valid, NORMS)
    value = add_row(x, rooms, rank, slot, place, valid, ROOM, RANKS, BLOCK)
    finish_row(value, held, scale, place, valid, out, total, eps, WIDTH, NORMS)


def launch(
    x: Tensor,
    rooms: Tensor,
    out: Tensor,
    norm: tuple[Tensor, Tensor, Tensor, float] | None,
    *,
    rank: int,
    slot: int,
    room: int,
) -> None:
    """Launch `copied_sum_kernel` for x [T, H], contiguous, of at most `room` bytes and at least one row.

    Args:
        norm: residual, total, weight and epsilon; None for sums alone.
    """
    rows, width = x.shape
    residual, total, weight, eps = (x, x, x, 0.0) if norm is None else norm
    block = next_power_of_2(width)
    copied_sum_kernel[(rows,)](
        x,
        rooms,
        out,
        residual,
        total,
        weight,
        eps,
        rank,
        slot,
        WIDTH=width,
        BLOCK=block,
        ROOM=room,
        RANKS=len(rooms),
        NORMS=norm is not None,
        num_warps=max(1, min(16, block // 512)),
    )
