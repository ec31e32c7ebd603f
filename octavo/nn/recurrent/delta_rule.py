"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.builder import ProgramBuilder
from octavo.native.recurrent import Delta
from octavo.nn.recurrent.rows import HostRows, before
from octavo.nn.step import StepInput

_CHUNK = 64
"""Tokens whose updates are solved for together."""


def normalized(x: Tensor) -> Tensor:
    """Return x / length of x over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, slots=True)
class Gates:
    """Learned numbers of each head, [heads] float32.

    Attributes:
        decay: negative rates of decay.
        bias: added to the inputs of the decay before the softplus.
    """

    decay: Tensor
    bias: Tensor

    def in_program(self, b: ProgramBuilder) -> Delta:
        """Return the rule with these numbers for a native program, which keeps them."""
        b.kept.extend((self.decay, self.bias))
        return Delta(decay=self.decay.data_ptr(), bias=self.bias.data_ptr())


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, raw: Tensor, rate: Tensor, gates: Gates, states: Tensor, step: StepInput
) -> Tensor:
    """Return each token's output, [T, heads, value channels] float32.

    For each head, with a = exp(decay * softplus(raw + bias)) and r = sigmoid(rate): S' = a_t S_(t-1),
    S_t = S' + r_t k_t (v_t - S'^T k_t)^T, y_t = S_t^T q_t. Queries and keys have length 1; queries are then divided by
    the root of their channels.

    Args:
        q, k: [T, key heads, key channels] float32, of any length; each serves as many consecutive heads.
        v: [T, heads, value channels] float32.
        raw, rate: [T, heads].
        states: [blocks, heads, key channels, value channels] float32, overwritten.
        step: that of the layer's cache group.
    """
    if q.is_cuda or step.table_rows is not None:
        from octavo.nn.recurrent import triton_delta  # needs triton, which machines without a GPU may lack

        return triton_delta.gated_delta_rule(q, k, v, raw, rate, gates, states, step)
    log_decay, rate = gates.decay * F.softplus(raw.float() + gates.bias), rate.float().sigmoid()
    q, k = normalized(q) * q.shape[-1] ** -0.5, normalized(k)
    rows = HostRows.of(step)
    q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], 1) for part in (q, k))
    out = torch.empty_like(v)
    if rows.single:
        state, blocks = before(states, step, rows.single)
        query, key, value = (part[rows.tokens][..., None, :] for part in (q, k, v))
        state *= log_decay[rows.tokens].exp()[..., None, None]
        state += key.mT @ ((value - key @ state) * rate[rows.tokens][..., None, None])
        states[blocks] = state
        out[rows.tokens] = (query @ state).squeeze(-2)
    for row, first, end in rows.several:
        state, blocks = before(states, step, [row])
        for begin in range(first, end, _CHUNK):
            chunk = slice(begin, min(begin + _CHUNK, end))
            query, key, value, decay, own_rate = (part[chunk].transpose(0, 1) for part in (q, k, v, log_decay, rate))
            own, state = _chunk(query, key, value, decay, own_rate, state[0])
            out[chunk] = own.transpose(0, 1)
        states[blocks] = state
    return out


def _chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs [heads, L, value channels], the state after the chunk [1, heads, keys, values]).

    The corrections u that a chunk's tokens write solve a triangular system (the UT transform), since each depends on
    those before it.
    """
    past = log_decay.cumsum(-1)
    decays = (past[..., None] - past[..., None, :]).tril_().exp_().tril_()
    system = (k @ k.mT) * decays * rate[..., None]
    begin = past.exp()[..., None]
    given = rate[..., None] * (v - begin * (k @ state))
    corrections = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    own = begin * (q @ state) + ((q @ k.mT) * decays) @ corrections
    left = (past[..., -1:] - past).exp()[..., None]
    after = state * past[..., -1].exp()[..., None, None] + (k * left).mT @ corrections
    return own, after[None]
