"""Latent attention on CPU with torch only, in the form that takes fewer operations for each row.

Rows with one query are multiplied by the heads' key and value matrices together; each then reads its own context, in
place if its blocks are adjacent. The expanded form works through the context in chunks, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.nn.attention.runs import runs_of
from octavo.nn.latent.base import LatentSpec, RowLatents, absorbs
from octavo.nn.step import StepInput

_QUERY_TILE = 128
_KEY_TILE = 1024


@dataclass(frozen=True, slots=True)
class LatentRow:
    """One row of a step.

    Attributes:
        begin, end: of its tokens in the batch.
        length: tokens of its sequence after this step.
        blocks: [n] int64, of its context; None if they are adjacent, from `first` on.
    """

    begin: int
    end: int
    length: int
    first: int
    blocks: Tensor | None

    def context(self, cache: Tensor) -> Tensor:
        """Return the latents of the sequence, [length, width]; a view if the blocks are adjacent."""
        size = cache.shape[1]
        if self.blocks is None:
            return cache.flatten(0, 1)[self.first * size : self.first * size + self.length]
        return cache[self.blocks].flatten(0, 1)[: self.length]


class TorchLatents(RowLatents):
    """Stateless: the plan of a step is in `step.attn`."""

    name = "torch"
    follows_table_rows = False

    def prepare(self, step: StepInput, block_size: int) -> list[LatentRow]:
        starts, tables = step.query_start.tolist(), step.block_tables.numpy()
        rows = []
        for row, length in enumerate(step.seq_lens.tolist()):
            table = tables[row, : -(-length // block_size)]
            if starts[row] == starts[row + 1]:
                continue
            adjacent = len(list(runs_of(table))) == 1
            blocks = None if adjacent else torch.from_numpy(table.astype("int64"))
            rows.append(LatentRow(starts[row], starts[row + 1], length, int(table[0]), blocks))
        return rows

    def attend(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> Tensor:
        rows: list[LatentRow] = step.attn
        out = torch.zeros(*q.shape[:2], spec.value_dim, dtype=q.dtype)
        absorbed = []
        for row in rows:
            if absorbs(row.end - row.begin, row.length, spec):
                absorbed.append(row)
            else:
                _attend_expanded(q, expansion, cache, row, spec, out)
        if absorbed:
            _attend_absorbed(q, expansion, cache, absorbed, spec, out)
        return out


def _attend_absorbed(
    q: Tensor, expansion: Tensor, cache: Tensor, rows: list[LatentRow], spec: LatentSpec, out: Tensor
) -> None:
    """Attend to the latents with the queries of these rows, whose matrix products are computed together."""
    tokens = torch.cat([torch.arange(row.begin, row.end) for row in rows])
    queries = q[tokens]
    keys, values = expansion.split([spec.nope_dim, spec.value_dim], dim=1)
    low = torch.bmm(queries[..., : spec.nope_dim].transpose(0, 1), keys).transpose(0, 1)
    wide = torch.cat([low, queries[..., spec.nope_dim :]], dim=-1)
    mixed = torch.empty(len(tokens), spec.num_heads, spec.rank, dtype=q.dtype)
    done = 0
    for row in rows:
        own = slice(done, done + row.end - row.begin)
        context = row.context(cache)[None]
        attended = _attend(
            wide[own].flatten(0, 1)[None], _pieces(context, spec), row.length, spec.scale, spec.num_heads
        )
        mixed[own] = attended[0].unflatten(0, (-1, spec.num_heads))
        done = own.stop
    out[tokens] = torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


def _attend_expanded(
    q: Tensor, expansion: Tensor, cache: Tensor, row: LatentRow, spec: LatentSpec, out: Tensor
) -> None:
    """Attend with the queries of one row to keys and values made from the latents."""
    queries = q[row.begin : row.end].transpose(0, 1)
    pieces = _expanded(row.context(cache), expansion, spec)
    out[row.begin : row.end] = _attend(queries, pieces, row.length, spec.scale).transpose(0, 1)


Piece = tuple[Tensor, Tensor]
"""Keys [heads, n, d] and values [heads, n, value width] of consecutive positions."""


def _pieces(context: Tensor, spec: LatentSpec) -> Iterator[Piece]:
    """Yield a context [1, length, width], whose latents are keys and values, chunk by chunk."""
    for chunk in context.split(_KEY_TILE, dim=1):
        yield chunk, chunk[..., : spec.rank]


def _expanded(context: Tensor, expansion: Tensor, spec: LatentSpec) -> Iterator[Piece]:
    """Yield the keys and values of a context [length, width], chunk by chunk."""
    for chunk in context.split(_KEY_TILE):
        low, turned = chunk.split([spec.rank, spec.rope_dim], dim=1)
        made = torch.matmul(low, expansion.transpose(1, 2))  # [heads, n, nope_dim + value_dim]
        k, v = made.split([spec.nope_dim, spec.value_dim], dim=2)
        yield torch.cat([k, turned[None].expand(spec.num_heads, -1, -1)], dim=2), v


def _attend(q: Tensor, pieces: Iterator[Piece], length: int, scale: float, group: int = 1) -> Tensor:
    """Return causal attention of the queries of a sequence's last n positions, in float32.

    The softmax over a union of key sets follows from that over each; see `nn/attention/cpu.py`.

    Args:
        q: [heads, n * group, d], `group` queries of each position.
        pieces: of all `length` positions, in order.

    Returns:
        [heads, n * group, value width] float32.
    """
    count = q.shape[1]
    past = length - count // group
    q = q.float() * scale
    peak = torch.full((*q.shape[:2], 1), float("-inf"))
    total = torch.zeros_like(peak)
    acc: Tensor | None = None
    first = 0
    for k, v in pieces:
        if acc is None:
            acc = torch.zeros(*q.shape[:2], v.shape[2])
        last = first + k.shape[1]
        keys, values = k.float().transpose(1, 2), v.float()
        for low in range(max(0, first - past) * group // _QUERY_TILE * _QUERY_TILE, count, _QUERY_TILE):
            rows = slice(low, min(low + _QUERY_TILE, count))
            scores = torch.matmul(q[:, rows], keys)
            if past + low // group < last - 1:
                positions = past + torch.arange(rows.start, rows.stop)[:, None] // group
                scores.masked_fill_(torch.arange(first, last) > positions, float("-inf"))
            highest = torch.maximum(peak[:, rows], scores.amax(-1, keepdim=True))
            safe = highest.clamp(min=torch.finfo(torch.float32).min)
            weights = scores.sub_(safe).exp_()
            decay = (peak[:, rows] - safe).exp_()
            total[:, rows] = total[:, rows] * decay + weights.sum(-1, keepdim=True)
            acc[:, rows] = acc[:, rows] * decay + torch.matmul(weights, values)
            peak[:, rows] = highest
        first = last
    assert acc is not None, "a row with queries has a context"
    return acc / total
