"""Find stretches of a paged KV cache that can be read in place: the torch CPU backend's plan of a step.

A block table maps a sequence to blocks anywhere in the cache. Where its ids ascend by one, the tokens form one strided
view. Decode rows are divided into *spans* (long stretches, each one call on a view), *ranges* (adjacent short stretches
of many rows, one batched call on a view of all their blocks) and *edges* (partly visible blocks, at most two per row,
the only cells that are copied).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# From this many blocks on, a separate call costs less than handling the stretch block by block.
LONG_RUN = 8
# Blocks of other sequences that a range may include rather than be split in two.
MAX_GAP = 3


@dataclass(frozen=True, slots=True)
class SharedRun:
    """`length` tokens from token cell `start` of the cache, read by all of `rows`; `tokens` are their batch indices."""

    start: int
    length: int
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Whole blocks [first, first + count). Block first + where[i] belongs to the row of batch index tokens[i].

    `readers` has a batch index for every block of the range, an arbitrary one for blocks of other sequences.
    """

    first: int
    count: int
    readers: Tensor
    where: Tensor


@dataclass(frozen=True, slots=True)
class Edges:
    """Partly visible blocks, one entry each: `hidden` is [n, block_size], true for hidden cells."""

    blocks: Tensor
    tokens: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The reads of all rows with one query. Parts are in the order spans, ranges, edges.

    Attributes:
        tokens: the rows' batch indices.
        part_tokens, part_rows: per part its row's batch index, and its row's index in `tokens`.
        parts_of_row: [rows, most parts of a row], each row's parts, with repetitions if it has fewer.
        single: every row has exactly one part, so no merge is needed.
    """

    tokens: Tensor
    spans: list[SharedRun]
    ranges: list[BlockRange]
    edges: Edges | None
    part_tokens: Tensor
    part_rows: Tensor
    parts_of_row: Tensor
    single: bool


@dataclass(frozen=True, slots=True)
class KvSegment:
    """A stretch of one sequence from `position` on: a run of the cache from token cell `start`, or listed blocks."""

    position: int
    length: int
    start: int = -1
    blocks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One row with several queries: batch indices [begin, begin + count), whose first has position `position`."""

    begin: int
    count: int
    position: int
    pieces: list[KvSegment]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    decode: DecodePlan | None
    chunks: list[ChunkPlan]


@dataclass(slots=True)
class HostLayout:
    """Host copies of a step's layout, and the plans made from it so far (one for each window in the model)."""

    query_start: list[int]
    seq_lens: list[int]
    tables: np.ndarray
    block_size: int
    plans: dict[int | None, BatchPlan]

    def plan(self, window: int | None) -> BatchPlan:
        if window is not None and window >= max(self.seq_lens, default=0):
            window = None
        if window not in self.plans:
            self.plans[window] = _plan(self, window)
        return self.plans[window]


def runs_of(table: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (index into the table, first block, count) of each maximal stretch of ids that ascend by one."""
    cuts = np.flatnonzero(np.diff(table) != 1) + 1
    bounds = [0, *cuts.tolist(), len(table)]
    for begin, end in itertools.pairwise(bounds):
        yield begin, int(table[begin]), end - begin


def _plan(batch: HostLayout, window: int | None) -> BatchPlan:
    decodes: list[_Row] = []
    chunks: list[ChunkPlan] = []
    for row, length in enumerate(batch.seq_lens):
        begin, end = batch.query_start[row], batch.query_start[row + 1]
        if begin == end:
            continue
        position = length - (end - begin)
        first = 0 if window is None else max(0, position - window + 1)
        table = batch.tables[row, : -(-length // batch.block_size)]
        if end - begin == 1:
            decodes.append(_Row(begin, first, length, table))
        else:
            pieces = list(_pieces(table, first, length, batch.block_size))
            chunks.append(ChunkPlan(begin, end - begin, position, pieces))
    return BatchPlan(_plan_decodes(decodes, batch.block_size) if decodes else None, chunks)


def _pieces(table: np.ndarray, first: int, length: int, block_size: int) -> Iterator[KvSegment]:
    """Divide positions [first, length) of one sequence; adjacent short runs become one piece of listed blocks."""
    skipped = first // block_size
    loose: list[int] = []
    loose_from = 0
    for index, block, count in runs_of(table[skipped:]):
        at = (skipped + index) * block_size
        if count < LONG_RUN and count < len(table) - skipped:
            if not loose:
                loose_from = at
            loose.extend(range(block, block + count))
            continue
        if loose:
            yield KvSegment(loose_from, at - loose_from, blocks=torch.tensor(loose))
            loose = []
        begin, end = max(at, first), min(at + count * block_size, length)
        yield KvSegment(begin, end - begin, start=block * block_size + begin - at)
    if loose:
        yield KvSegment(loose_from, length - loose_from, blocks=torch.tensor(loose))


class _Row(NamedTuple):
    """A row with one query, at batch index `token`, which sees positions [first, length) of the blocks in `table`."""

    token: int
    first: int
    length: int
    table: np.ndarray


@dataclass(slots=True)
class _Reads:
    """What rows with one query read.

    Attributes:
        spans: long stretches: (first cell, tokens) -> batch indices.
        whole: other whole blocks: (how often the block was read before, block, batch index).
        edges: partly visible blocks: (block, batch index, first visible offset, end of the visible ones).
    """

    spans: dict[tuple[int, int], list[int]]
    whole: list[tuple[int, int, int]]
    edges: list[tuple[int, int, int, int]]


def _reads(rows: list[_Row], block_size: int) -> _Reads:
    spans: dict[tuple[int, int], list[int]] = defaultdict(list)
    whole: list[tuple[int, int, int]] = []
    edges: list[tuple[int, int, int, int]] = []
    seen: dict[int, int] = defaultdict(int)
    for token, first, length, table in rows:
        skipped = first // block_size
        for index, block, count in runs_of(table[skipped:]):
            at = (skipped + index) * block_size
            if count >= LONG_RUN or count == len(table) - skipped:
                begin, end = max(at, first), min(at + count * block_size, length)
                spans[block * block_size + begin - at, end - begin].append(token)
                continue
            for offset in range(count):
                low = max(first - (at + offset * block_size), 0)
                high = min(length - (at + offset * block_size), block_size)
                if low == 0 and high == block_size:
                    whole.append((seen[block + offset], block + offset, token))
                    seen[block + offset] += 1
                else:
                    edges.append((block + offset, token, low, high))
    return _Reads(spans, whole, edges)


def _plan_decodes(rows: list[_Row], block_size: int) -> DecodePlan:
    reads = _reads(rows, block_size)
    span_list = [SharedRun(start, size, torch.tensor(tokens)) for (start, size), tokens in reads.spans.items()]
    ranges = list(_ranges(reads.whole))
    parts = [token for tokens in reads.spans.values() for token in tokens]
    parts += [token for _, _, token in sorted(reads.whole)] + [token for _, token, _, _ in reads.edges]
    row_of = {row.token: i for i, row in enumerate(rows)}
    parts_of: list[list[int]] = [[] for _ in rows]
    for part, token in enumerate(parts):
        parts_of[row_of[token]].append(part)
    most = max(len(own) for own in parts_of)
    return DecodePlan(
        tokens=torch.tensor([row.token for row in rows]),
        spans=span_list,
        ranges=ranges,
        edges=_edges(reads.edges, block_size) if reads.edges else None,
        part_tokens=torch.tensor(parts),
        part_rows=torch.tensor([row_of[token] for token in parts]),
        parts_of_row=torch.tensor([own + own[:1] * (most - len(own)) for own in parts_of]),
        single=len(parts) == len(rows),
    )


def _ranges(whole: list[tuple[int, int, int]]) -> Iterator[BlockRange]:
    """Group (copy, block, token) triples; a block that several rows read occurs once in each copy."""
    group: list[tuple[int, int, int]] = []
    for entry in [*sorted(whole), (-1, 0, 0)]:
        if group and (entry[0] != group[-1][0] or entry[1] - group[-1][1] > MAX_GAP + 1):
            first, last = group[0][1], group[-1][1]
            where = torch.tensor([block - first for _, block, _ in group])
            readers = torch.zeros(last - first + 1, dtype=torch.long)
            readers[where] = torch.tensor([token for _, _, token in group])
            yield BlockRange(first, last - first + 1, readers, where)
            group = []
        group.append(entry)


def _edges(entries: list[tuple[int, int, int, int]], block_size: int) -> Edges:
    blocks, tokens, low, high = torch.tensor(entries).unbind(1)
    cells = torch.arange(block_size)
    hidden = (cells < low[:, None]) | (cells >= high[:, None])
    return Edges(blocks, tokens, hidden)
