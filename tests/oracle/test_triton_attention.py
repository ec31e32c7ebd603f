"""Triton's attention kernels against float64: on the GPU where there is one, else small, under the interpreter."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import ragged
import torch

pytest.importorskip("triton")

from octavo.nn.attention import triton_few, triton_plan
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.step import SharedContexts
from octavo.worker.resident.sharing import grouped

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if GPU else torch.float16
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]
LONGEST = 20_000 if GPU else 150
FEW = {"rows": [(1, 1), (2, 1), (31, 1), (33, 1), (64, 1), (100, 1), (LONGEST, 1)]}
MANY = {"rows": [(1, 1), (LONGEST, 40), (33, 33), (5, 2), (40, 1), (130, 130), (70, 9)]}
DRAFTS = {"rows": [(1, 1), (9, 4), (LONGEST, 3), (64, 2), (3, 3)]}


def check(case: ragged.Case) -> None:
    q = case.q(len(case.label))
    got = ragged.run(case, TritonAttention(case.dtype, case.spec), q, device=DEVICE)
    assert got.dtype == q.dtype
    expected = case.expected(q)
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs())
    limit = ragged.TOLERANCE[case.dtype]
    assert bool((wrong <= limit).all()), f"off by {wrong.nan_to_num(torch.inf).max()} with {case.label}"


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


@pytest.mark.parametrize("rows", [FEW, MANY, DRAFTS], ids=["few", "many", "drafts"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches(dtype, rows):
    check(ragged.make_case(fresh_seed(), dtype, heads=(2, 4), head_dim=64, block_size=16, **rows))


@pytest.mark.parametrize("rows", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [(1, 3), (2, 1), (1, 8)] if GPU else [(1, 3)], ids=str)
def test_shapes(head_dim, heads, rows):
    rows = rows if GPU else {"rows": [(min(length, 50), min(queries, 50)) for length, queries in rows["rows"][:4]]}
    block_size = random.Random(head_dim).choice([8, 16, 32, 64])
    check(ragged.make_case(fresh_seed(), HALF, heads=heads, head_dim=head_dim, block_size=block_size, **rows))


@pytest.mark.parametrize("rows", [FEW, MANY, DRAFTS], ids=["few", "many", "drafts"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        pytest.param({"window": 37}, marks=pytest.mark.slow),
        pytest.param({"window": 130}, marks=pytest.mark.slow),
        pytest.param({"soft_cap": 5.0}, marks=pytest.mark.slow),
        {"window": 90, "soft_cap": 20.0},
        {"window": 37, "chunked": True, "biased": True, "sinks": True},
        {"chunked": True, "window": 90},
        {"biased": True},
        {"sinks": True, "soft_cap": 20.0},
        {"window": 37, "sinks": True},
    ][: None if GPU else 6],
    ids=str,
)
def test_windows_soft_caps_biases_and_sinks(options, rows):
    check(ragged.make_case(fresh_seed(), torch.float32, heads=(1, 2), head_dim=32, block_size=16, **rows, **options))


@pytest.mark.parametrize("trial", range(12 if GPU else 4))
def test_random_batches(trial):
    rng = random.Random(fresh_seed())
    lengths = [rng.randint(1, LONGEST // 4 if GPU else 80) for _ in range(rng.randint(1, 9))]
    rows = [(n, rng.choice([1, 1, rng.randint(1, n), min(n, 5)])) for n in lengths]
    check(ragged.make_case(rng.randrange(2**31), HALF, rows=rows))


@pytest.mark.parametrize("rows", [FEW, MANY, DRAFTS], ids=["few", "many", "drafts"])
@pytest.mark.parametrize(
    "kind",
    [
        None,
        *(
            pytest.param(kind, marks=[pytest.mark.slow] * (not GPU))
            for kind in (torch.float8_e4m3fn, torch.float8_e5m2)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 96, "window": 37, "soft_cap": 20.0, "sinks": True},
        {"head_dim": 64, "biased": True},
        {"head_dim": 128},
        {"head_dim": 256, "window": 64, "chunked": True},
    ][: None if GPU else 1],
    ids=str,
)
def test_from_the_projection(options, kind, rows):
    """Rows with many queries take this step's keys as they were projected; all others come from the cache."""
    check_fused(ragged.make_case(fresh_seed(), HALF, heads=(2, 2), block_size=16, **rows, **options), kind)


@pytest.mark.parametrize("rows", [MANY, DRAFTS], ids=["many", "drafts"])
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"window": 90, "soft_cap": 20.0, "sinks": True}], ids=str)
def test_tokens_that_attend_to_later_ones(options, rows):
    check(
        ragged.make_case(fresh_seed(), HALF, heads=(1, 2), head_dim=32, block_size=16, mutual=True, **rows, **options)
    )


@pytest.mark.parametrize("rows", [MANY, DRAFTS], ids=["many", "drafts"])
@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn], ids=str)
def test_tokens_that_attend_to_later_ones_from_the_projection(kind, rows):
    case = ragged.make_case(
        fresh_seed(), HALF, heads=(2, 2), head_dim=64, block_size=16, window=64, mutual=True, **rows
    )
    check_fused(case, kind)


def check_fused(
    case: ragged.Case,
    kind: torch.dtype | None,
    shared: SharedContexts | None = None,
    backend: TritonAttention | None = None,
) -> None:
    """Without rotation and norms, which have tests of their own. `kind` is an FP8 cache's dtype."""
    spec, backend = case.spec, backend or TritonAttention(case.dtype, case.spec)
    q = case.q(len(case.label))
    plain = ragged.filled_cache(case, backend, DEVICE)
    step, _, _ = ragged.prepared(case, backend, q, plain.clone(), DEVICE)
    scales, cache = None, plain
    if kind is not None:
        generator = torch.Generator().manual_seed(1)
        scales = torch.rand(2, spec.num_kv_heads, generator=generator) / (32 if kind == torch.float8_e4m3fn else 4096)
        scales += scales.max() / 2
        cache = (plain.float() / scales.to(DEVICE)[:, :, None, None]).to(kind)
        few = max(s.queries for s in case.sequences) <= backend.most_few and case.ahead is None
        for s in case.sequences:
            rounded = s.length - (0 if few or s.queries == 1 else s.queries)
            for part, x in enumerate((s.k, s.v)):
                unit = scales[part][:, None]
                x[:rounded] = ((x[:rounded].float() / unit).to(kind).float() * unit).to(x.dtype)
        q = q / 8  # rounding to the case's dtype just now moves scores less
    parts = [q, *(torch.cat([getattr(s, name)[s.length - s.queries :] for s in case.sequences]) for name in "kv")]
    qkv = torch.cat(parts, dim=1).to(DEVICE)
    half = spec.head_dim // 2
    still = torch.cat([torch.ones(LONGEST, half), torch.zeros(LONGEST, half)], dim=1).to(DEVICE)
    there = None if scales is None else scales.to(DEVICE)
    if shared is not None:
        step.shared = shared
        step.attn = backend.prepare(step, case.block_size)
    sinks = None if case.sinks is None else case.sinks.to(DEVICE)
    got = backend.rotate_and_attend(qkv, None, still, cache, there, step, spec, sinks)
    assert got.dtype == q.dtype
    expected = case.expected(q)
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs())
    limit = ragged.TOLERANCE[case.dtype] * (1 if kind is None else 2)
    assert bool((wrong <= limit).all()), f"off by {wrong.nan_to_num(torch.inf).max()} with {kind} {case.label}"


@pytest.mark.parametrize("splits", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_context_in_parts(monkeypatch, splits):
    """Also where some parts are empty, because the context is short."""
    monkeypatch.setattr("octavo.nn.attention.triton_few.num_splits", lambda *_: splits)
    for rows in (FEW, DRAFTS):
        check(ragged.make_case(fresh_seed(), torch.float32, heads=(2, 2), head_dim=64, block_size=16, **rows))


def test_tiles_with_the_most_keys_come_first():
    case = ragged.make_case(1, HALF, heads=(1, 1), head_dim=64, block_size=16, rows=[(140, 140), (10, 9), (3, 1)])
    backend = TritonAttention(case.dtype, case.spec)
    step, _, _ = ragged.prepared(case, backend, case.q(1), device=DEVICE)
    step.query_lens, step.past_lens = [140, 9, 1], [0, 1, 2]
    assert backend.prepare(step, 16).many.tiles.cpu().view(-1, 2).tolist() == [[0, 128], [1, 0], [0, 0]]
    step.past_lens = [0, 5000, 2]
    launches = backend.prepare(step, 16)
    assert launches.many.tiles.cpu().view(-1, 2).tolist() == [[1, 0], [0, 128], [0, 0]]
    assert launches.few.rows.tolist() == [2]


def test_padding_rows_are_finite():
    """A row of length 0 reads nothing: its cache and table may hold anything."""
    case = ragged.make_case(3, torch.float32, heads=(1, 2), head_dim=32, block_size=16, rows=[(20, 1), (7, 1)])
    backend = TritonAttention(case.dtype, case.spec)
    q = case.q(1)
    step, cache, q_there = ragged.prepared(case, backend, q, device=DEVICE)
    step.seq_lens[1] = 0
    out = backend.attend(q_there, cache, step, case.spec).cpu()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    torch.testing.assert_close(out[0].double(), case.expected(q)[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "kind", [None, torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "options",
    [
        {"heads": (2, 3), "head_dim": 96, "soft_cap": 20.0, "sinks": True},
        {"heads": (1, 4), "head_dim": 128},
        {"heads": (2, 1), "head_dim": 64},
        {"heads": (1, 2), "head_dim": 256},
    ][: None if GPU else 1],
    ids=str,
)
def test_what_contexts_have_in_common_is_read_once(monkeypatch, kind, options):
    """Groups of all sizes, strangers and padding; in one part each and in several, some of them empty."""
    rng = random.Random(fresh_seed())
    parts = rng.choice([(1, 1), (2, 4), (1, 2), (4, 3)])
    monkeypatch.setattr("octavo.nn.attention.triton_few.num_splits", lambda *_: parts[0])
    monkeypatch.setattr("octavo.nn.attention.triton_few._common_splits", lambda *_: parts[1])
    longest = 4000 if GPU else LONGEST
    rows = [
        (longest, 1),
        (longest, 1),
        *((rng.randint(1, longest), 1) for _ in range(rng.randint(5, 40) if GPU else 4)),
    ]
    case = ragged.make_case(rng.randrange(2**31), HALF, block_size=rng.choice([16, 32]), rows=rows, **options)
    for place, taker in enumerate(case.sequences[1:], 1):
        if place == 1 or rng.random() < 0.8:
            ragged.share(taker, case.sequences[rng.randrange(place)], 1.0, case.block_size)
    check_fused(case, kind, shared=groups_of(case))


def groups_of(case: ragged.Case) -> SharedContexts:
    """As the runner makes them."""
    whole = np.array([(s.length - 1) // case.block_size for s in case.sequences])
    tables = np.zeros((len(whole), whole.max() + 1), dtype=np.int32)
    for table, sequence, count in zip(tables, case.sequences, whole, strict=True):
        table[:count] = sequence.blocks[:count]
    most, tokens = TritonAttention(case.dtype, case.spec).sharing()
    found = grouped(tables, whole, most, tokens // case.block_size)
    assert found is not None
    size = len(whole)
    return SharedContexts.of(torch.from_numpy(found.padded(size, most, case.block_size)).to(DEVICE), size)


def test_padding_rows_share_nothing_and_are_finite(monkeypatch):
    monkeypatch.setattr("octavo.nn.attention.triton_few._common_splits", lambda *_: 2)
    rows = [(100, 1), (90, 1), (130, 1), (1, 1), (1, 1)]
    case = ragged.make_case(5, torch.float32, heads=(1, 2), head_dim=32, block_size=16, rows=rows)
    for taker in case.sequences[1:3]:
        ragged.share(taker, case.sequences[0], 1.0, 16)
    backend = TritonAttention(case.dtype, case.spec)
    q = case.q(1)
    step, cache, q_there = ragged.prepared(case, backend, q, device=DEVICE)
    step.seq_lens[3:] = 0
    step.shared = groups_of(case)
    assert step.shared.lens.tolist() == [64, 64, 64, 0, 0]
    step.attn = backend.prepare(step, 16)
    out = backend.attend(q_there, cache, step, case.spec).cpu()
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))
    torch.testing.assert_close(out[:3].double(), case.expected(q)[:3], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (None, {}),
        (None, {"sinks": True, "soft_cap": 20.0}),
        (torch.float8_e5m2, {}),
        pytest.param(torch.float8_e4m3fn, {"sinks": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [1, 3])
def test_contexts_of_unequal_lengths(kind, options, most, monkeypatch):
    """One long context is divided into many parts, for one query and for drafts."""
    if not GPU:
        monkeypatch.setattr(triton_few, "_multiprocessors", lambda device: 4)
        monkeypatch.setattr(triton_plan, "LEAST", 16)
    launched = []
    launch = triton_plan.launch
    monkeypatch.setattr(triton_plan, "launch", lambda *args: launched.append(launch(*args)))
    lengths = [1, 20, LONGEST, 33, 64, 100, 17] * (40 if GPU else 1)
    rng = random.Random(fresh_seed())
    rng.shuffle(lengths)
    rows = [(length, min(length, rng.randint(1, most))) for length in lengths]
    case = ragged.make_case(fresh_seed(), HALF, heads=(2, 4), head_dim=64, block_size=16, rows=rows, **options)
    check_fused(case, kind)
    assert launched


@pytest.mark.parametrize("beside", [0, 20])
@pytest.mark.parametrize("trial", range(3))
def test_a_plan_of_parts(trial, beside):
    rng = random.Random(fresh_seed())
    count, more, counters = rng.randint(1, 60), rng.randint(1, 70), rng.randint(1, 2000)
    lens = torch.tensor([rng.choice([0, 1, 30, rng.randint(1, 400)]) for _ in range(count + 3)], dtype=torch.int32)
    rows = torch.tensor(rng.sample(range(count + 3), count), dtype=torch.int32)
    plan = torch.full((4 * (count + more) + counters,), 77, dtype=torch.int32, device=DEVICE)
    bounds = triton_plan.Bounds(16, 12, beside)
    triton_plan.launch(plan, rows.to(DEVICE), lens.to(DEVICE), count, more, counters, bounds)
    table, ended = plan[: 4 * (count + more)].view(-1, 4).tolist(), plan[4 * (count + more) :]
    assert not ended.any()
    keys = lens[rows.long()].tolist()
    at_once = max(1, more // 2)

    def divided(parts: int) -> list[int]:
        size = max(-(-sum(keys) // parts), 16)
        return [min(max(1, key // size), 12) for key in keys]

    def took(parts: list[int]) -> int:
        longest = max(-(-key // each) for key, each in zip(keys, parts, strict=True))
        return max(longest + beside, -(-sum(parts) // at_once) * (-(-sum(keys) // sum(parts)) + beside))

    expected = divided(more)
    if beside:
        expected = min(divided(at_once), expected, key=took)
    several = [parts if parts > 1 else 0 for parts in expected]
    assert sum(several) <= more
    slots = [[item, part, parts, sum(several[:item])] for item, parts in enumerate(expected) for part in range(parts)]
    assert table[: len(slots)] == slots
    assert all(slot[0] == -1 for slot in table[len(slots) :])
