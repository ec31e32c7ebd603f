"""Fresh random batches for attention backends, and what the answer is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.nn.attention.base import AttentionBackend, AttentionSpec
from octavo.nn.attention.kv_int8 import pack, unpack
from octavo.nn.attention.reference import attend_dense
from octavo.nn.step import StepInput

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Absolute, and relative to the expected value on top: outputs are of order 1.

In float32 the worst of a case is typically 0.2 of it; heads of 256, with more to sum, come to 0.4 once in some hundred.
"""


def tolerance(dtype: torch.dtype, backend: AttentionBackend) -> float:
    """As `TOLERANCE`, for what a backend makes of its cache. Each is twice the worst of a thousand cases or more."""
    if not getattr(backend, "int8", False):
        return TOLERANCE[dtype]
    if backend.name == "torch":
        return 5 * TOLERANCE[dtype]  # integers times their scales are rounded once more on their way to torch's kernel
    return max(TOLERANCE[dtype], 2e-3)  # queries and weights are integers of 16 bits


@dataclass
class Sequence:
    """All of one sequence's keys and values; its last `queries` tokens are computed by the step under test."""

    k: Tensor
    v: Tensor
    blocks: list[int]
    queries: int

    @property
    def length(self) -> int:
        return self.k.shape[0]


@dataclass
class Case:
    spec: AttentionSpec
    dtype: torch.dtype
    block_size: int
    num_blocks: int
    sequences: list[Sequence]
    label: str
    sinks: Tensor | None = None
    unseen: Tensor | None = None
    ahead: Tensor | None = None

    def q(self, seed: int) -> Tensor:
        count = sum(s.queries for s in self.sequences)
        return _randn((count, self.spec.num_heads, self.spec.head_dim), seed, 2.0).to(self.dtype)

    def expected(self, q: Tensor, *, int8: bool = False) -> Tensor:
        """The answer, and with `int8` that for keys and values which were rounded to a cache of 8-bit integers."""
        outs, start = [], 0
        for s in self.sequences:
            k, v = (unpack(pack(x), torch.float64) if int8 else x for x in (s.k, s.v))
            mine = slice(start, start + s.queries)
            unseen = None if self.unseen is None else self.unseen[mine]
            ahead = None if self.ahead is None else self.ahead[mine]
            outs.append(attend_dense(q[mine], k, v, self.spec, self.sinks, unseen, ahead))
            start += s.queries
        return torch.cat(outs)


def make_case(
    seed: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] | None = None,
    head_dim: int | None = None,
    block_size: int | None = None,
    rows: list[tuple[int, int]] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    biased: bool = False,
    chunked: bool = False,
    sinks: bool = False,
    branched: bool = False,
    mutual: bool = False,
) -> Case:
    """A case drawn from `seed`, with what is given held fixed. `rows` are (length, queries) pairs; `biased`: heads have
    linear biases; `chunked`, `sinks`: as in `AttentionSpec`; `branched`: rows end with trees of drafts; `mutual`:
    runs of tokens attend to each other."""
    rng = random.Random(seed)
    kv_heads, group = heads or rng.choice([(3, 3), (1, 8), (4, 1), (2, 4), (1, 1)])
    head_dim = head_dim or rng.choice([32, 64, 96, 128, 256])
    block_size = block_size or rng.choice([8, 16, 32])
    rows = rows or [_row(rng) for _ in range(rng.randint(1, 7))]
    slopes = tuple(rng.choice([0.004, 0.1, 0.5]) for _ in range(kv_heads * group)) if biased else None
    spec = AttentionSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, soft_cap, slopes, chunked, sinks)
    sequences = _sequences(rng, rows, spec, dtype, block_size)
    needed = max(max(s.blocks) for s in sequences) + 1
    label = f"seed={seed} {dtype} {spec} block_size={block_size} rows={rows}"
    scores = torch.tensor([rng.choice([-200.0, -3.0, 0.0, 4.0, 30.0, 200.0]) for _ in range(spec.num_heads)])
    unseen = torch.cat([_unseen(rng, s.queries) for s in sequences]) if branched else None
    ahead = torch.cat([_ahead(rng, s.queries) for s in sequences]) if mutual else None
    count = needed + rng.randint(0, 3)
    return Case(spec, dtype, block_size, count, sequences, label, scores if sinks else None, unseen, ahead)


def _ahead(rng: random.Random, queries: int) -> Tensor:
    """`StepInput.ahead` of a row with up to three runs of tokens that attend to each other; it may begin within one, as
    after a cached prefix."""
    words = torch.zeros(queries, dtype=torch.int32)
    cuts = sorted(rng.sample(range(queries + 1), min(6, (queries + 1) // 2 * 2)))
    for begin, end in zip(cuts[::2], cuts[1::2], strict=True):
        words[begin:end] = torch.arange(end - begin - 1, -1, -1)
    return words


def _unseen(rng: random.Random, queries: int) -> Tensor:
    """`StepInput.unseen` of a row whose last tokens, up to 30 of them, are a random tree."""
    words = torch.zeros(queries, dtype=torch.int32)
    drafts = rng.randint(0, min(queries - 1, 30))
    if drafts:
        tree = DraftTree(tuple(rng.randint(-1, i - 1) for i in range(drafts)))
        words[-drafts:] = torch.from_numpy(tree.unseen)
    return words


def _row(rng: random.Random) -> tuple[int, int]:
    length = rng.choice([rng.randint(1, 40), rng.randint(1, 700)])
    queries = rng.choice([1, 1, length, rng.randint(1, length)])
    return length, queries


def _sequences(
    rng: random.Random, rows: list[tuple[int, int]], spec: AttentionSpec, dtype: torch.dtype, block_size: int
) -> list[Sequence]:
    """Sequences whose blocks lie in order, scattered, or dealt out in turn; some begin with another's whole blocks."""
    counts = [-(-length // block_size) for length, _ in rows]
    ids = list(range(sum(counts) + rng.randint(0, 8)))
    if rng.random() < 0.4:
        rng.shuffle(ids)
    deal = rng.random() < 0.3
    tables: list[list[int]] = [[] for _ in rows]
    while any(len(t) < c for t, c in zip(tables, counts, strict=True)):
        for table, count in zip(tables, counts, strict=True):
            take = min(count - len(table), 1 if deal else count)
            table.extend(ids.pop(0) for _ in range(take))
    sequences: list[Sequence] = []
    for (length, queries), blocks in zip(rows, tables, strict=True):
        shape = (length, spec.num_kv_heads, spec.head_dim)
        k, v = (_randn(shape, rng.random(), 1.5).to(dtype) for _ in range(2))
        taker = Sequence(k, v, blocks, queries)
        if sequences and rng.random() < 0.5:
            donor = rng.choice(sequences)
            share(taker, donor, rng.random(), block_size)
        sequences.append(taker)
    return sequences


def share(taker: Sequence, donor: Sequence, part: float, block_size: int) -> None:
    """Let `taker` begin with `part` of the whole blocks that both could have in common."""
    most = min(one.length - one.queries for one in (taker, donor)) // block_size
    count = round(part * most)
    taker.blocks[:count] = donor.blocks[:count]
    taker.k[: count * block_size] = donor.k[: count * block_size]
    taker.v[: count * block_size] = donor.v[: count * block_size]


def _randn(shape: tuple[int, ...], seed: float, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator) * scale


CPU = torch.device("cpu")


def filled_cache(case: Case, backend: AttentionBackend, device: torch.device = CPU) -> Tensor:
    """A cache in which the contexts are written, through the backend, and every other cell or scale is NaN."""
    shape = backend.cache_shape(case.spec, case.num_blocks, case.block_size)
    assert shape[0] == case.num_blocks
    blank, dtype = (-1, torch.int8) if getattr(backend, "int8", False) else (float("nan"), case.dtype)
    cache = torch.full(shape, blank, dtype=dtype, device=device)
    past = [s for s in case.sequences if s.length > s.queries]
    if past:
        k = torch.cat([s.k[: s.length - s.queries] for s in past])
        v = torch.cat([s.v[: s.length - s.queries] for s in past])
        slots = [slot for s in past for slot in _slots(s, case.block_size)[: s.length - s.queries]]
        step = _step([(s.length - s.queries, s.length - s.queries, s.blocks) for s in past], slots, device)
        step.attn = backend.prepare(step, case.block_size)
        backend.write(k.to(device), v.to(device), cache, step)
    return cache


def run(
    case: Case, backend: AttentionBackend, q: Tensor, cache: Tensor | None = None, device: torch.device = CPU
) -> Tensor:
    """One step as a model's layer does it: write the new keys and values, then attend."""
    step, cache, q = prepared(case, backend, q, cache, device)
    sinks = None if case.sinks is None else case.sinks.to(device)
    return backend.attend(q, cache, step, case.spec, sinks)


def prepared(
    case: Case, backend: AttentionBackend, q: Tensor, cache: Tensor | None = None, device: torch.device = CPU
) -> tuple[StepInput, Tensor, Tensor]:
    """The step before it attends: its input, the cache with everything in it, and q on the device."""
    cache = filled_cache(case, backend, device) if cache is None else cache
    step = _step(
        [(s.length, s.queries, s.blocks) for s in case.sequences],
        [slot for s in case.sequences for slot in _slots(s, case.block_size)[s.length - s.queries :]],
        device,
    )
    step.unseen = None if case.unseen is None else case.unseen.to(device)
    step.ahead = None if case.ahead is None else case.ahead.to(device)
    step.attn = backend.prepare(step, case.block_size)
    # As in a model, q, k and v are strided views of one fused projection's output.
    k = torch.cat([s.k[s.length - s.queries :] for s in case.sequences])
    v = torch.cat([s.v[s.length - s.queries :] for s in case.sequences])
    fused = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1).to(device)
    parts = fused.split([q.shape[1] * q.shape[2], k[0].numel(), v[0].numel()], dim=1)
    q, k, v = (part.unflatten(1, (-1, case.spec.head_dim)) for part in parts)
    backend.write(k, v, cache, step)
    return step, cache, q


def _slots(s: Sequence, block_size: int) -> list[int]:
    return [s.blocks[p // block_size] * block_size + p % block_size for p in range(s.length)]


def _step(rows: list[tuple[int, int, list[int]]], slots: list[int], device: torch.device) -> StepInput:
    counts = [queries for _, queries, _ in rows]
    width = max(len(blocks) for _, _, blocks in rows) + 1
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    for table, (_, _, blocks) in zip(tables, rows, strict=True):
        table[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    total = sum(counts)
    positions = torch.cat([torch.arange(length - n, length) for length, n, _ in rows])
    return StepInput(
        input_ids=torch.zeros(total, dtype=torch.long, device=device),
        positions=positions.to(device),
        query_start=starts.to(device),
        seq_lens=torch.tensor([length for length, _, _ in rows], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(slots, device=device),
        logit_rows=torch.tensor([], dtype=torch.long, device=device),
        max_query_len=max(counts),
        max_seq_len=max(length for length, _, _ in rows),
    )
