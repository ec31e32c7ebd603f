"""The state space of Mamba-2 (`ssd.py`) on a GPU: one launch, for single tokens and for prompts.

A program computes a row's channels of one head: it loads the state once, advances it by the row's tokens, in chunks as
matrix products, and stores it once. A step of single tokens therefore reads and writes each state once, which is nearly
all of its traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.recurrent.triton_rows import place, row_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.nn.recurrent.ssd import Rates
    from octavo.nn.step import StepInput

_CHUNK = 32
_WARPS = 8
"""With a head of 64 channels and 128 numbers each, larger chunks or fewer warps spill registers."""


@triton.jit
def _step_sizes(raw, bias, low, high):
    raw += bias
    return tl.minimum(tl.maximum(tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0)))), low), high)


@triton.jit(do_not_specialize=["table_stride"])
def _ssd_kernel(
    x,
    raw,
    b,
    c,
    decays,
    skips,
    biases,
    states,
    out,
    query_start,
    seq_lens,
    tables,
    table_rows,
    low,
    high,
    x_stride,
    raw_stride,
    b_stride,
    c_stride,
    table_stride,
    block_stride,
    HAS_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first, end, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    if end == first:  # a recorded step has more rows than most steps need
        return
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    inside = (p < CHANNELS)[:, None] & (n < STATE)[None, :]
    cells = states + block * block_stride + head * CHANNELS * STATE + p[:, None] * STATE + n[None, :]
    state = tl.load(cells, mask=inside & known, other=0.0)
    decay = tl.load(decays + head)
    skip = tl.load(skips + head)
    bias = tl.load(biases + head)
    x += head * CHANNELS
    b += head // SHARE * STATE
    c += head // SHARE * STATE
    out += head * CHANNELS
    if SINGLE or end - first == 1:
        t = first.to(tl.int64)
        dt = _step_sizes(tl.load(raw + t * raw_stride + head).to(tl.float32), bias, low, high)
        own = tl.load(x + t * x_stride + p, mask=p < CHANNELS, other=0.0)
        into = tl.load(b + t * b_stride + n, mask=n < STATE, other=0.0)
        read = tl.load(c + t * c_stride + n, mask=n < STATE, other=0.0)
        state = state * tl.exp(dt * decay) + (dt * own)[:, None] * into[None, :]
        y = tl.sum(state * read[None, :], 1) + skip * own
        tl.store(out + t * (HEADS * CHANNELS) + p, y, mask=p < CHANNELS)
    else:
        i = tl.arange(0, CHUNK)
        for begin in range(first, end, CHUNK):
            t = (begin + i).to(tl.int64)
            exists = begin + i < end
            dt = _step_sizes(
                tl.load(raw + t * raw_stride + head, mask=exists, other=0.0).to(tl.float32), bias, low, high
            )
            dt = tl.where(exists, dt, 0.0)
            own = tl.load(
                x + t[:, None] * x_stride + p[None, :], mask=exists[:, None] & (p < CHANNELS)[None, :], other=0.0
            )
            wanted = exists[:, None] & (n < STATE)[None, :]
            into = tl.load(b + t[:, None] * b_stride + n[None, :], mask=wanted, other=0.0)
            read = tl.load(c + t[:, None] * c_stride + n[None, :], mask=wanted, other=0.0)
            rate = dt * decay
            past = tl.cumsum(rate, 0)
            whole = tl.sum(rate, 0)
            distance = tl.where(i[:, None] >= i[None, :], past[:, None] - past[None, :], -1e30)
            weights = tl.dot(read, tl.trans(into), input_precision=PRECISION) * tl.exp(distance)
            scaled = own * dt[:, None]
            y = tl.dot(weights, scaled, input_precision=PRECISION) + skip * own
            y += tl.exp(past)[:, None] * tl.dot(read, tl.trans(state), input_precision=PRECISION)
            tl.store(
                out + t[:, None] * (HEADS * CHANNELS) + p[None, :],
                y,
                mask=exists[:, None] & (p < CHANNELS)[None, :],
            )
            left = scaled * tl.exp(whole - past)[:, None]
            state = state * tl.exp(whole) + tl.dot(tl.trans(left), into, input_precision=PRECISION)
    tl.store(cells, state, mask=inside & held)


def ssd(x: Tensor, raw: Tensor, b: Tensor, c: Tensor, rates: Rates, states: Tensor, step: StepInput) -> Tensor:
    """See `ssd.ssd`; tokens may have any distance in each argument."""
    tokens, heads, channels = x.shape
    size = b.shape[2]
    out = states.new_empty(tokens, heads, channels)
    block = max(16, min(64, next_power_of_2(channels)))
    _ssd_kernel[(step.num_rows, heads, cdiv(channels, block))](
        x,
        raw,
        b,
        c,
        rates.decay,
        rates.skip,
        rates.bias,
        states,
        out,
        **row_arguments(step),
        low=rates.low,
        high=min(rates.high, 1e30),
        x_stride=x.stride(0),
        raw_stride=raw.stride(0),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        block_stride=states.stride(0),
        HEADS=heads,
        SHARE=heads // b.shape[1],
        CHANNELS=channels,
        STATE=size,
        SINGLE=step.max_query_len == 1,
        PRECISION="tf32x3" if raw.element_size() == 4 else "tf32",
        CHUNK=_CHUNK,
        BLOCK_P=block,
        BLOCK_N=max(16, next_power_of_2(size)),
        num_warps=_WARPS,
        num_stages=1,
    )
    return out
