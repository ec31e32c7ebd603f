"""The state space of Mamba, with a decay per channel and state (Gu & Dao 2023, https://arxiv.org/abs/2312.00752)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.recurrent.rows import HostRows, before
from octavo.nn.step import StepInput


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, skip: Tensor, states: Tensor, step: StepInput
) -> Tensor:
    """Return each token's output, [T, channels] float32.

    For each channel: S_t = exp(dt_t * decay) * S_(t-1) + dt_t x_t B_t, y_t = S_t · C_t + skip * x_t.

    Args:
        x, dt: [T, channels] float32; step sizes after bias and softplus.
        b, c: [T, N] float32.
        decay: [channels, N] float32, negative.
        skip: [channels] float32.
        states: [blocks, channels, N] float32, overwritten.
        step: that of the layer's cache group.
    """
    if x.is_cuda or step.table_rows is not None:
        from octavo.nn.recurrent import triton_scan  # needs triton, which machines without a GPU may lack

        return triton_scan.selective_scan(x, dt, b, c, decay, skip, states, step)
    rows = HostRows.of(step)
    out = torch.empty_like(x)
    if rows.single:
        state, blocks = before(states, step, rows.single)
        some = rows.tokens
        out[some] = _advance(state, x[some], dt[some], b[some], c[some], decay)
        states[blocks] = state
    for row, first, end in rows.several:
        state, blocks = before(states, step, [row])
        for t in range(first, end):
            one = slice(t, t + 1)
            out[one] = _advance(state, x[one], dt[one], b[one], c[one], decay)
        states[blocks] = state
    return out.add_(x * skip)


def _advance(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    """Advance states [n, channels, N] in place by a token each; return its output [n, channels]."""
    state *= (dt[..., None] * decay).exp_()
    state += (dt * x)[..., None] * b[:, None]
    return (state * c[:, None]).sum(-1)
