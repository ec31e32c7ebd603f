"""The state space of Mamba-2, with a scalar decay per head (Dao & Gu 2024, https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.builder import ProgramBuilder
from octavo.native.recurrent import Ssd
from octavo.nn.recurrent.rows import HostRows, before
from octavo.nn.step import StepInput

_CHUNK = 64
"""Tokens computed as one block of a matrix product."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Learned numbers of each head, [heads] float32.

    Attributes:
        decay: negative rates of decay.
        skip: factor of a token's own input that is added to its output.
        bias: added to the step sizes before the softplus.
        low, high: limits of the step sizes.
    """

    decay: Tensor
    skip: Tensor
    bias: Tensor
    low: float
    high: float

    def step_sizes(self, raw: Tensor) -> Tensor:
        """Return the step sizes, [T, heads] float32."""
        return F.softplus(raw.float() + self.bias).clamp(self.low, self.high)

    def in_program(self, b: ProgramBuilder) -> Ssd:
        """Return the state space with these rates for a native program, which keeps them."""
        tensors = (self.decay, self.skip, self.bias)
        b.kept.extend(tensors)
        decay, skip, bias = (tensor.data_ptr() for tensor in tensors)
        return Ssd(decay=decay, skip=skip, bias=bias, low=self.low, high=self.high)


def ssd(x: Tensor, raw: Tensor, b: Tensor, c: Tensor, rates: Rates, states: Tensor, step: StepInput) -> Tensor:
    """Return each token's output, [T, heads, channels] float32.

    For each head, with step sizes dt: S_t = exp(dt_t * decay) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + skip * x_t.

    Args:
        x: [T, heads, channels] float32.
        raw: [T, heads], step sizes before bias and softplus.
        b, c: [T, groups, N] float32; each group serves as many consecutive heads.
        states: [blocks, heads, channels, N] float32, overwritten.
        step: that of the layer's cache group.
    """
    if x.is_cuda or step.table_rows is not None:
        from octavo.nn.recurrent import triton_ssd  # needs triton, which machines without a GPU may lack

        return triton_ssd.ssd(x, raw, b, c, rates, states, step)
    rows, dt = HostRows.of(step), rates.step_sizes(raw)
    share = x.shape[1] // b.shape[1]
    out = torch.empty_like(x)
    if rows.single:
        state, blocks = before(states, step, rows.single)
        own, size = x[rows.tokens], dt[rows.tokens]
        into, read = (part[rows.tokens].repeat_interleave(share, 1) for part in (b, c))
        state *= (size * rates.decay).exp_()[..., None, None]
        state += (own * size[..., None])[..., None] * into[:, :, None]
        states[blocks] = state
        out[rows.tokens] = (state @ read[..., None]).squeeze(-1)
    for row, first, end in rows.several:
        state, blocks = before(states, step, [row])
        for begin in range(first, end, _CHUNK):
            chunk = slice(begin, min(begin + _CHUNK, end))
            out[chunk], state = _chunk(x[chunk], dt[chunk], b[chunk], c[chunk], rates.decay, state[0], share)
        states[blocks] = state
    return out.add_(x * rates.skip[:, None])


def _chunk(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor, share: int
) -> tuple[Tensor, Tensor]:
    """Return (outputs [L, heads, channels], the state after the chunk [1, heads, channels, N])."""
    past = (dt * decay).cumsum(0).T
    scores = torch.einsum("ign,jgn->gij", c, b).repeat_interleave(share, 0)
    distance = past[:, :, None] - past[:, None]
    weights = scores * distance.tril_().exp_().tril_()
    scaled = (x * dt[..., None]).transpose(0, 1)
    into, read = (part.transpose(0, 1).repeat_interleave(share, 0) for part in (b, c))
    own = weights @ scaled + past.exp()[..., None] * (read @ state.transpose(1, 2))
    left = (past[:, -1:] - past).exp_()[..., None]
    after = state * past[:, -1].exp()[:, None, None] + (scaled * left).transpose(1, 2) @ into
    return own.transpose(0, 1), after[None]
