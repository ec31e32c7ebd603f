"""The gated delta rule (`delta_rule.py`) on a GPU: one launch, which advances states token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.recurrent.triton_rows import place, row_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.nn.recurrent.delta_rule import Gates
    from octavo.nn.step import StepInput

_BLOCK = 32
"""Value channels of a program, which keeps its part of the state in registers."""


@triton.jit(do_not_specialize=["table_stride"])
def _delta_kernel(
    q,
    k,
    v,
    raw,
    rates,
    decays,
    biases,
    states,
    out,
    query_start,
    seq_lens,
    tables,
    table_rows,
    q_stride,
    k_stride,
    v_stride,
    raw_stride,
    rate_stride,
    table_stride,
    block_stride,
    HAS_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    first, end, held, known, block = place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS)
    if end == first:  # a recorded step has more rows than most steps need
        return
    i = tl.arange(0, BLOCK_K)
    j = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (i < KEYS)[:, None] & (j < VALUES)[None, :]
    cells = states + block * block_stride + head * KEYS * VALUES + i[:, None] * VALUES + j[None, :]
    state = tl.load(cells, mask=inside & known, other=0.0)
    decay = tl.load(decays + head)
    bias = tl.load(biases + head)
    q += head // SHARE * KEYS
    k += head // SHARE * KEYS
    t = first.to(tl.int64)
    for _ in range(first, end):
        query = tl.load(q + t * q_stride + i, mask=i < KEYS, other=0.0)
        key = tl.load(k + t * k_stride + i, mask=i < KEYS, other=0.0)
        value = tl.load(v + t * v_stride + head * VALUES + j, mask=j < VALUES, other=0.0)
        query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * KEYS**-0.5
        key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        gate = tl.load(raw + t * raw_stride + head).to(tl.float32) + bias
        gate = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
        rate = 1.0 / (1.0 + tl.exp(-tl.load(rates + t * rate_stride + head).to(tl.float32)))
        state *= tl.exp(decay * gate)
        correction = (value - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * correction[None, :]
        tl.store(out + (t * HEADS + head) * VALUES + j, tl.sum(state * query[:, None], 0), mask=j < VALUES)
        t += 1
    tl.store(cells, state, mask=inside & held)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, raw: Tensor, rate: Tensor, gates: Gates, states: Tensor, step: StepInput
) -> Tensor:
    """See `delta_rule.gated_delta_rule`; tokens may have any distance in each argument."""
    tokens, heads, values = v.shape
    keys = k.shape[2]
    out = states.new_empty(tokens, heads, values)
    block = min(_BLOCK, next_power_of_2(values))
    _delta_kernel[(step.num_rows, heads, cdiv(values, block))](
        q,
        k,
        v,
        raw,
        rate,
        gates.decay,
        gates.bias,
        states,
        out,
        **row_arguments(step),
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        raw_stride=raw.stride(0),
        rate_stride=rate.stride(0),
        block_stride=states.stride(0),
        HEADS=heads,
        SHARE=heads // k.shape[1],
        KEYS=keys,
        VALUES=values,
        BLOCK_K=next_power_of_2(keys),
        BLOCK_V=block,
    )
    return out
