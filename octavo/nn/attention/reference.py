"""The oracle: attention written out plainly, one row and one head group at a time, in float64. Slow on purpose."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec, seen
from octavo.nn.attention.kv_int8 import SCALE_BYTES, pack, unpack
from octavo.nn.step import StepInput


class ReferenceAttention:
    """The reference for all other backends. Supports any device, dtype, block size and spec.

    Attributes:
        int8: the cache holds 8-bit integers with scales, as `kv_int8.pack` makes them.
    """

    name = "reference"
    follows_table_rows = True

    def __init__(self, *, int8: bool = False) -> None:
        self.int8 = int8

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[block, key or value, offset in the block, head, channel]."""
        width = spec.head_dim + (SCALE_BYTES if self.int8 else 0)
        return (num_blocks, 2, block_size, spec.num_kv_heads, width)

    def prepare(self, step: StepInput, block_size: int) -> None:
        return None

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        block_size = cache.shape[2]
        if self.int8:
            k, v = pack(k), pack(v)
        for token, slot in enumerate(step.slot_mapping.tolist()):
            block, offset = divmod(slot, block_size)
            cache[block, 0, offset] = k[token]
            cache[block, 1, offset] = v[token]

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        block_size = cache.shape[2]
        starts = step.query_start.tolist()
        tables = step.block_tables if step.table_rows is None else step.block_tables[step.table_rows]
        out = torch.empty_like(q)
        for row, seq_len in enumerate(step.seq_lens.tolist()):
            blocks = tables[row, : -(-seq_len // block_size)].long()
            context = cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len]
            if self.int8:
                context = unpack(context, torch.float64)
            queries = slice(starts[row], starts[row + 1])
            unseen = None if step.unseen is None else step.unseen[queries]
            ahead = None if step.ahead is None else step.ahead[queries]
            own = attend_dense(q[queries], context[:, 0], context[:, 1], spec, sinks, unseen, ahead)
            out[queries] = own.to(q.dtype)
        return out


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    unseen: Tensor | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """Return softmax(mask(cap(scale · q kᵀ) + bias)) v of one sequence, in float64.

    Args:
        q: [n, num_heads, head_dim], the queries of the sequence's last n positions.
        k, v: [length, num_kv_heads, head_dim], the whole sequence.
        sinks: [num_heads], scores of a last key, whose value is 0.
        unseen, ahead: [n], as in `StepInput`.

    Returns:
        [n, num_heads, head_dim] float64.
    """
    count, length = q.shape[0], k.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    keys = torch.arange(length, device=q.device)
    positions = torch.arange(length - count, length, device=q.device)[:, None]
    visible = keys <= (positions if ahead is None else positions + ahead[:, None])
    if spec.window is not None:
        visible &= keys >= spec.first_visible(positions)
    if unseen is not None:
        visible &= seen(unseen[:, None], positions - keys)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for head in range(spec.num_heads):
        keys_of_head = k[:, head // group].double()
        scores = spec.scale * (q[:, head].double() @ keys_of_head.T)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        if spec.slopes is not None:
            scores += spec.slopes[head] * (keys - positions)
        scores.masked_fill_(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(count, 1)], dim=1)
        weights = scores.softmax(dim=-1)[:, :length]
        out[:, head] = weights @ v[:, head // group].double()
    return out
