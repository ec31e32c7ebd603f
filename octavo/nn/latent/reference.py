"""The oracle: latent attention written out plainly in the expanded form, one row and head at a time, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.latent.base import LatentSpec, RowLatents
from octavo.nn.step import StepInput


class ReferenceLatents(RowLatents):
    """The reference for all other backends. Supports any device, dtype, block size and spec."""

    name = "reference"
    follows_table_rows = True

    def prepare(self, step: StepInput, block_size: int) -> None:
        return None

    def attend(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> Tensor:
        starts = step.query_start.tolist()
        tables = step.block_tables if step.table_rows is None else step.block_tables[step.table_rows]
        out = torch.zeros(*q.shape[:2], spec.value_dim, dtype=q.dtype, device=q.device)
        for row, seq_len in enumerate(step.seq_lens.tolist()):
            blocks = tables[row, : -(-seq_len // cache.shape[1])].long()
            context = cache[blocks].flatten(0, 1)[:seq_len]
            queries = slice(starts[row], starts[row + 1])
            out[queries] = attend_expanded(q[queries], context, expansion, spec).to(q.dtype)
        return out


def attend_expanded(q: Tensor, latents: Tensor, expansion: Tensor, spec: LatentSpec) -> Tensor:
    """Return softmax(mask(scale · q kᵀ)) v of one sequence, in float64.

    Args:
        q: [n, num_heads, nope_dim + rope_dim], the queries of the sequence's last n positions.
        latents: [length, rank + rope_dim], the whole sequence.
        expansion: [num_heads, nope_dim + value_dim, rank].

    Returns:
        [n, num_heads, value_dim] float64.
    """
    count, length = q.shape[0], latents.shape[0]
    positions = torch.arange(length - count, length, device=q.device)[:, None]
    hidden = torch.arange(length, device=q.device) > positions
    low, turned = latents.double().split([spec.rank, spec.rope_dim], dim=1)
    out = torch.empty(count, spec.num_heads, spec.value_dim, dtype=torch.float64, device=q.device)
    for head in range(spec.num_heads):
        made = low @ expansion[head].double().T
        k, v = made.split([spec.nope_dim, spec.value_dim], dim=1)
        scores = spec.scale * (q[:, head].double() @ torch.cat([k, turned], dim=1).T)
        out[:, head] = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1) @ v
    return out
