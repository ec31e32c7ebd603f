"""Causal convolutions of `conv.py` on a GPU: one launch for single tokens, two if rows have several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv
from octavo.nn.recurrent.triton_rows import place, row_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.nn.step import StepInput

_CHANNELS = 256
_TILE = (16, 128)
"""Tokens and channels of a program of `_conv_kernel`."""


@triton.jit(do_not_specialize=["table_stride"])
def _step_kernel(
    x,
    weight,
    bias,
    states,
    out,
    query_start,
    seq_lens,
    tables,
    table_rows,
    x_stride,
    table_stride,
    block_stride,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute rows of one token each, and shift their states."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = c < CHANNELS
    first, _, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    state = states + block * block_stride + c * (TAPS - 1)
    own = tl.load(x + first.to(tl.int64) * x_stride + c, mask=valid & held, other=0.0).to(tl.float32)
    total = own * tl.load(weight + c * TAPS + TAPS - 1, mask=valid, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=valid, other=0.0)
    for i in tl.static_range(TAPS - 1):
        past = tl.load(state + i, mask=valid & known, other=0.0)
        total += past * tl.load(weight + c * TAPS + i, mask=valid, other=0.0)
        if i > 0:
            tl.store(state + i - 1, past, mask=valid & held)
    tl.store(state + TAPS - 2, own, mask=valid & held)
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + first.to(tl.int64) * CHANNELS + c, tl.where(held, total, 0.0), mask=valid)


@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_tokens"])
def _conv_kernel(
    x,
    weight,
    bias,
    states,
    out,
    query_start,
    seq_lens,
    tables,
    table_rows,
    x_stride,
    table_stride,
    block_stride,
    num_rows,
    num_tokens,
    HAS_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SEARCHES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a tile of tokens of any rows, which are found by bisection. The states stay as they are."""
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = t < num_tokens
    row = tl.zeros([TILE], tl.int32)
    above = row + num_rows
    for _ in tl.static_range(SEARCHES):
        middle = (row + above) // 2
        before = tl.load(query_start + middle, mask=exists, other=0) <= t
        row = tl.where(before, middle, row)
        above = tl.where(before, above, middle)
    first, _, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    valid = (exists & held)[:, None] & (c < CHANNELS)[None, :]
    state = (states + block * block_stride)[:, None] + (c * (TAPS - 1))[None, :]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=c < CHANNELS, other=0.0)[None, :]
    for i in tl.static_range(TAPS):
        offset = t - first - (TAPS - 1) + i
        inside = (offset >= 0)[:, None]
        place_of = (first + offset).to(tl.int64)[:, None] * x_stride + c[None, :]
        own = tl.load(x + place_of, mask=valid & inside, other=0.0).to(tl.float32)
        past = tl.load(state + (offset + TAPS - 1)[:, None], mask=valid & (inside == 0) & known[:, None], other=0.0)
        total += (own + past) * tl.load(weight + c * TAPS + i, mask=c < CHANNELS, other=0.0)[None, :]
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    stored = exists[:, None] & (c < CHANNELS)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :], tl.where(valid, total, 0.0), mask=stored)


@triton.jit(do_not_specialize=["table_stride"])
def _shift_kernel(
    x,
    states,
    query_start,
    seq_lens,
    tables,
    table_rows,
    x_stride,
    table_stride,
    block_stride,
    HAS_ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keep the last inputs of each row. A kept input is read before its place is overwritten."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    if end == first:  # a recorded step has more rows than most steps need
        return
    valid = (c < CHANNELS) & held
    state = states + block * block_stride + c * (TAPS - 1)
    for i in tl.static_range(TAPS - 1):
        offset = end - first - (TAPS - 1) + i
        own = tl.load(x + (first + offset).to(tl.int64) * x_stride + c, mask=valid & (offset >= 0), other=0.0)
        past = tl.load(state + offset + TAPS - 1, mask=valid & known & (offset < 0), other=0.0)
        tl.store(state + i, own.to(tl.float32) + past, mask=valid)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, step: StepInput, *, activates: bool
) -> Tensor:
    """See `conv.causal_conv`; x may have any distance between tokens."""
    tokens, channels = x.shape
    out = states.new_empty(tokens, channels)
    rows, common = step.num_rows, row_arguments(step) | {"CHANNELS": channels, "TAPS": weight.shape[1]}
    strides = {"x_stride": x.stride(0), "block_stride": states.stride(0)}
    form = {"HAS_BIAS": bias is not None, "ACTIVATES": activates}
    given = (x, weight, weight if bias is None else bias, states, out)
    blocks = cdiv(channels, _CHANNELS)
    if step.max_query_len == 1:
        _step_kernel[(rows, blocks)](*given, **common, **strides, **form, BLOCK=_CHANNELS)
        return out
    tile, block = _TILE
    _conv_kernel[(cdiv(tokens, tile), cdiv(channels, block))](
        *given,
        **common,
        **strides,
        **form,
        num_rows=rows,
        num_tokens=tokens,
        SEARCHES=rows.bit_length(),
        TILE=tile,
        BLOCK=block,
    )
    _shift_kernel[(rows, blocks)](x, states, **common, **strides, BLOCK=_CHANNELS)
    return out
