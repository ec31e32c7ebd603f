"""Attention on CPU with torch only: fused kernels on views of the cache, merged by log-sum-exp.

Softmax over a union of key sets follows from the softmax over each: with o_i and l_i the output and log-sum-exp of
part i, the whole is sum_i exp(l_i - l) o_i with l = log sum_i exp(l_i). So a context need not be contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.kv_int8 import SCALE_BYTES, pack, unpack
from octavo.nn.attention.rowwise import attend_row
from octavo.nn.attention.runs import BlockRange, ChunkPlan, DecodePlan, Edges, HostLayout, KvSegment, SharedRun
from octavo.nn.step import StepInput

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUERY_TILE = 128
_KEY_TILE = 1024
PartialAttention = tuple[Tensor, Tensor]
"""An output [..., head_dim] and its log-sum-exp [...] float32."""
_flash: Callable[..., PartialAttention] | None = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None
)
Interval = tuple[int, int]
"""Positions [first, last) in a sequence."""


class TorchAttention:
    """Reads the context in place; only a row's partly filled blocks and a chunk's scattered blocks are copied.

    Attributes:
        int8: the cache holds 8-bit integers with scales, as `kv_int8.pack` makes them; what is read is unpacked first.
    """

    name = "torch"
    follows_table_rows = False

    def __init__(self, *, int8: bool = False) -> None:
        self.int8 = int8

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[block, offset in the block, key or value, head, channel]: tokens of adjacent blocks are evenly spaced."""
        width = spec.head_dim + (SCALE_BYTES if self.int8 else 0)
        return (num_blocks, block_size, 2, spec.num_kv_heads, width)

    def prepare(self, step: StepInput, block_size: int) -> HostLayout:
        return HostLayout(step.query_start.tolist(), step.seq_lens.tolist(), step.block_tables.numpy(), block_size, {})

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        if self.int8:
            k, v = pack(k), pack(v)
        if not cache.is_contiguous():  # a part of each block
            size = cache.shape[1]
            cache[step.slot_mapping // size, step.slot_mapping % size] = torch.stack([k, v], dim=1)
            return
        cells = cache.flatten(0, 1)
        cells[:, 0].index_copy_(0, step.slot_mapping, k)
        cells[:, 1].index_copy_(0, step.slot_mapping, v)

    def widen(self, queries: int) -> int:
        """Do nothing: rows of any length are computed alike."""
        return queries

    def move(self, caches: Tensor, sources: Tensor, targets: Tensor) -> None:
        cells = caches.flatten(1, 2)
        cells[:, targets] = cells[:, sources]

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        plain = spec.slopes is None and not spec.chunked and step.unseen is None and step.ahead is None
        if not plain or not cache.is_contiguous():
            return _attend_rows(q, cache, step, spec, sinks)
        plan = step.attn.plan(spec.window)
        out = torch.empty_like(q)
        if plan.decode is not None:
            _attend_decodes(q, cache, plan.decode, spec, sinks, out)
        for chunk in plan.chunks:
            _attend_chunk(q, cache, chunk, spec, sinks, out)
        return out


def _attend_rows(q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend with what the fused kernel lacks."""
    layout: HostLayout = step.attn
    out = torch.empty_like(q)
    starts = layout.query_start
    for row, length in enumerate(layout.seq_lens):
        blocks = layout.tables[row, : -(-length // layout.block_size)].astype("int64")
        cells = _plain(cache[torch.from_numpy(blocks)].flatten(0, 1)[:length], q.dtype)
        rows = slice(starts[row], starts[row + 1])
        unseen, ahead = (None if one is None else one[rows] for one in (step.unseen, step.ahead))
        out[rows] = attend_row(q[rows], cells[:, 0], cells[:, 1], spec, sinks, unseen, ahead).to(q.dtype)
    return out


def _attend_decodes(
    q: Tensor, cache: Tensor, plan: DecodePlan, spec: AttentionSpec, sinks: Tensor | None, out: Tensor
) -> None:
    """Attend with the query heads of one kv head in the query dimension, so that each key is read once for all."""
    grouped = q.unflatten(1, (spec.num_kv_heads, -1))
    parts = [_span(grouped, cache, span, spec) for span in plan.spans]
    parts += [_range(grouped, cache, blocks, spec) for blocks in plan.ranges]
    if plan.edges is not None:
        parts.append(_edges(grouped, cache, plan.edges, spec))
    outs = torch.cat([part[0] for part in parts])
    if plan.single and sinks is None:
        out[plan.part_tokens] = outs.flatten(1, 2).to(out.dtype)
        return
    lses = torch.cat([part[1] for part in parts]).unsqueeze(-1)
    rows, count = plan.part_rows, len(plan.tokens)
    peak = lses[plan.parts_of_row].amax(1)
    weights = torch.exp(lses - peak[rows])
    total = torch.zeros_like(peak).index_add_(0, rows, weights)
    mixed = weights.new_zeros(count, *outs.shape[1:]).index_add_(0, rows, weights * outs)
    if sinks is not None:
        total += torch.exp(sinks.view(1, spec.num_kv_heads, -1, 1) - peak)
    out[plan.tokens] = mixed.div_(total).flatten(1, 2).to(out.dtype)


def _span(q: Tensor, cache: Tensor, span: SharedRun, spec: AttentionSpec) -> PartialAttention:
    k, v = _view(cache, span.start, span.length, q.dtype)
    count, group = len(span.tokens), q.shape[2]
    queries = q[span.tokens].transpose(0, 1).flatten(1, 2)
    out, lse = _attend(queries[None], k[None], v[None], spec)
    return (
        out[0].unflatten(1, (count, group)).transpose(0, 1),
        lse[0].unflatten(1, (count, group)).transpose(0, 1),
    )


def _range(q: Tensor, cache: Tensor, blocks: BlockRange, spec: AttentionSpec) -> PartialAttention:
    cells = _plain(cache[blocks.first : blocks.first + blocks.count], q.dtype)
    k, v = cells.permute(2, 0, 3, 1, 4).unbind(0)
    out, lse = _attend(q[blocks.readers], k, v, spec)
    return out[blocks.where], lse[blocks.where]


def _edges(q: Tensor, cache: Tensor, edges: Edges, spec: AttentionSpec) -> PartialAttention:
    """Attend to partly visible blocks. Hidden cells may hold anything, NaN included, so they are zeroed in a copy."""
    cells = cache[edges.blocks].masked_fill_(edges.hidden[:, :, None, None, None], 0)
    k, v = _plain(cells, q.dtype).permute(2, 0, 3, 1, 4).unbind(0)
    return _attend(q[edges.tokens], k, v, spec, ~edges.hidden[:, None, None, :])


def _attend_chunk(
    q: Tensor, cache: Tensor, plan: ChunkPlan, spec: AttentionSpec, sinks: Tensor | None, out: Tensor
) -> None:
    end = plan.position + plan.count
    window = spec.window if spec.window is not None and spec.window < end else None
    cut = _tiles if window is not None or spec.soft_cap is not None else _halves
    queries = q[plan.begin : plan.begin + plan.count].unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)
    acc = torch.zeros(queries.shape, dtype=torch.float32)
    lse = torch.full(queries.shape[:3], float("-inf"))
    for piece in plan.pieces:
        k, v = (x.unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in _keys_values(cache, piece, q.dtype))
        for (low, high), (first, last) in cut(piece, plan, window):
            rows = slice(low - plan.position, high - plan.position)
            cells = slice(first - piece.position, last - piece.position)
            args = queries[:, :, rows], k[:, :, cells], v[:, :, cells], spec
            if last <= low + 1 and window is None:
                part = _attend(*args)
            elif low == first and window is None:
                part = _attend(*args, causal=True)
            else:
                part = _attend_plain(*args, _visible((low, high), (first, last), window))
            _merge(acc[:, :, rows], lse[:, :, rows], part)
    if sinks is not None:
        acc *= torch.sigmoid(lse - sinks.view(spec.num_kv_heads, -1, 1)).unsqueeze(-1)
    out[plan.begin : plan.begin + plan.count] = acc.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)


def _halves(piece: KvSegment, plan: ChunkPlan, window: int | None) -> Iterator[tuple[Interval, Interval]]:
    """Yield (positions of queries, positions of keys) so that every pair is either fully visible or a causal square."""
    assert window is None, "a window needs tiles"
    end = plan.position + plan.count
    first, last = piece.position, piece.position + piece.length
    if first < plan.position:
        yield (plan.position, end), (first, min(last, plan.position))
    first = max(first, plan.position)
    if first < last:
        yield (first, last), (first, last)
        if last < end:
            yield (last, end), (first, last)


def _tiles(piece: KvSegment, plan: ChunkPlan, window: int | None) -> Iterator[tuple[Interval, Interval]]:
    """Like `_halves`, in tiles of queries that each attend to at least one of the keys; the rest is masked."""
    first, last = piece.position, piece.position + piece.length
    begin, end = max(plan.position, first), plan.position + plan.count
    if window is not None:
        end = min(end, last - 1 + window)
    for low in range(begin, end, _QUERY_TILE):
        high = min(low + _QUERY_TILE, end)
        yield (low, high), (first if window is None else max(first, low - window + 1), min(last, high))


def _visible(queries: Interval, keys: Interval, window: int | None) -> Tensor:
    positions = torch.arange(*queries)[:, None]
    cells = torch.arange(*keys)
    visible = cells <= positions
    return visible if window is None else visible & (cells > positions - window)


def _keys_values(cache: Tensor, piece: KvSegment, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, [num_kv_heads, length, head_dim] each; views unless the blocks are scattered or
    packed."""
    if piece.blocks is None:
        return _view(cache, piece.start, piece.length, dtype)
    k, v = _plain(cache[piece.blocks].flatten(0, 1)[: piece.length], dtype).permute(1, 2, 0, 3)
    return k, v


def _view(cache: Tensor, start: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    k, v = _plain(cache.flatten(0, 1)[start : start + length], dtype).permute(1, 2, 0, 3)
    return k, v


def _plain(cells: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cells of the cache as numbers of `dtype`."""
    return unpack(cells, dtype) if cells.dtype == torch.int8 else cells


def _merge(acc: Tensor, lse: Tensor, part: PartialAttention) -> None:
    """Merge a part into the running output and log-sum-exp, in place. `lse` may be -inf, the part's must not be."""
    out, new = part
    total = torch.logaddexp(lse, new)
    acc.mul_((lse - total).exp_().unsqueeze(-1)).add_(out * (new - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visible: Tensor | None = None, *, causal: bool = False
) -> PartialAttention:
    """Attend with q [B, H, n, d], k and v [B, H, L, d]; `visible` broadcasts to [B, H, n, L]; `causal` masks from the
    first query and key on."""
    if spec.soft_cap is not None or _flash is None or not _flash_works():
        if causal:
            visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril_()
        return _attend_plain(q, k, v, spec, visible)
    mask = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale)
    return out, lse


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, visible: Tensor | None) -> PartialAttention:
    """Like `_attend`, in float32 and in tiles of keys, with the features that the fused kernel lacks."""
    acc = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:-1], float("-inf"))
    q = q.float() * spec.scale
    for begin in range(0, k.shape[-2], _KEY_TILE):
        keys, values = (x[..., begin : begin + _KEY_TILE, :].float() for x in (k, v))
        scores = q @ keys.transpose(-1, -2)
        if spec.soft_cap is not None:
            scores = torch.tanh(scores.div_(spec.soft_cap)).mul_(spec.soft_cap)
        if visible is not None:
            scores.masked_fill_(~visible[..., begin : begin + _KEY_TILE], float("-inf"))
        peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        # A query without visible keys in this tile has total 0 and log-sum-exp -inf, so it adds nothing.
        new = (total.log() + peak).squeeze(-1)
        merged = torch.logaddexp(lse, new)
        safe = torch.where(merged == float("-inf"), 0.0, merged)
        acc = acc * (lse - safe).exp().unsqueeze(-1) + (weights @ values) * (peak - safe.unsqueeze(-1)).exp()
        lse = merged
    return acc, lse


@functools.cache
def _flash_works() -> bool:
    """Return whether this torch has the kernel of scaled_dot_product_attention with the results that this file
    needs."""
    if _flash is None:
        return False
    x = torch.ones(1, 2, 3, 8)
    try:
        out, lse = _flash(x, x, x, 0.0, True, attn_mask=None, scale=0.125)
    except (RuntimeError, TypeError):
        return False
    expected = 1 + torch.tensor([1.0, 2.0, 3.0]).log()
    return bool(out.shape == x.shape and lse.shape == x.shape[:3] and torch.allclose(lse[0, 0], expected))
