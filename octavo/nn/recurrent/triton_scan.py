"""The state space of Mamba (`selective.py`) on a GPU: one launch, which advances states token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.recurrent.triton_rows import place, row_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.nn.step import StepInput

_BLOCK = 64


@triton.jit(do_not_specialize=["table_stride"])
def _scan_kernel(
    x,
    dt,
    b,
    c,
    decays,
    skips,
    states,
    out,
    query_start,
    seq_lens,
    tables,
    table_rows,
    b_stride,
    c_stride,
    table_stride,
    block_stride,
    HAS_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    first, end, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    if end == first:  # a recorded step has more rows than most steps need
        return
    p = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, BLOCK_N)
    valid = p < CHANNELS
    inside = valid[:, None] & (n < STATE)[None, :]
    place_of = p[:, None] * STATE + n[None, :]
    cells = states + block * block_stride + place_of
    state = tl.load(cells, mask=inside & known, other=0.0)
    decay = tl.load(decays + place_of, mask=inside, other=0.0)
    skip = tl.load(skips + p, mask=valid, other=0.0)
    t = first.to(tl.int64)
    for _ in range(first, end):
        size = tl.load(dt + t * CHANNELS + p, mask=valid, other=0.0)
        own = tl.load(x + t * CHANNELS + p, mask=valid, other=0.0)
        into = tl.load(b + t * b_stride + n, mask=n < STATE, other=0.0)
        read = tl.load(c + t * c_stride + n, mask=n < STATE, other=0.0)
        state = state * tl.exp(size[:, None] * decay) + (size * own)[:, None] * into[None, :]
        tl.store(out + t * CHANNELS + p, tl.sum(state * read[None, :], 1) + skip * own, mask=valid)
        t += 1
    tl.store(cells, state, mask=inside & held)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, skip: Tensor, states: Tensor, step: StepInput
) -> Tensor:
    """See `selective.selective_scan`; x and dt must be contiguous."""
    channels, size = decay.shape
    out = x.new_empty(x.shape)
    _scan_kernel[(step.num_rows, cdiv(channels, _BLOCK))](
        x,
        dt,
        b,
        c,
        decay,
        skip,
        states,
        out,
        **row_arguments(step),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        block_stride=states.stride(0),
        CHANNELS=channels,
        STATE=size,
        BLOCK=_BLOCK,
        BLOCK_N=next_power_of_2(size),
    )
    return out
