"""Drafts that branch in Triton's attention, against float64: on the GPU where there is one, else small, under the
interpreter."""

from __future__ import annotations

import random

import pytest
import ragged
import torch
from test_triton_attention import DEVICE, GPU, HALF, LONGEST, check_fused, fresh_seed

from octavo.core.draft_tree import DraftTree
from octavo.nn.attention import triton_few, triton_plan
from octavo.nn.attention.base import AttentionSpec, BranchingBackend
from octavo.nn.attention.libraries.attention import LibraryAttention
from octavo.nn.attention.triton import TritonAttention

FEW = [(1, 1), (9, 8), (LONGEST, 7), (66, 8), (3, 3)]
WIDE = [(20, 1), (31, 31), (LONGEST, 20), (70, 9), (47, 16)]
MANY = [(9, 1), (150, 140), (LONGEST, 40), (12, 12), (100, 66)]
ROWS = {"few": FEW, "wide": WIDE, "many": MANY}
WIDEST = {"few": 8, "wide": 31, "many": 8}
PLAIN = {"heads": (2, 1), "head_dim": 32, "block_size": 16}


def backend_of(case: ragged.Case, queries: int) -> TritonAttention:
    backend = TritonAttention(case.dtype, case.spec)
    backend.widen(queries)
    return backend


def branched(rows: list[tuple[int, int]], dtype: torch.dtype = torch.float32, **options) -> ragged.Case:
    """With one row whose tree is certain to branch: all its drafts follow the row's last known token."""
    case = ragged.make_case(fresh_seed(), dtype, rows=rows, branched=True, **(PLAIN | options))
    assert case.unseen is not None
    row = max(range(len(rows)), key=lambda i: min(rows[i][1], 31))
    end, drafts = sum(queries for _, queries in rows[: row + 1]), min(rows[row][1] - 1, 30)
    case.unseen[end - drafts : end] = torch.from_numpy(DraftTree((-1,) * drafts).unseen)
    return case


def errors(case: ragged.Case, got: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Beyond what rounding explains, for each token."""
    expected = case.expected(q)
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs()) / ragged.TOLERANCE[case.dtype]
    return wrong.nan_to_num(torch.inf).amax((1, 2))


def check(case: ragged.Case, backend: BranchingBackend) -> None:
    q = case.q(len(case.label))
    wrong = errors(case, ragged.run(case, backend, q, device=DEVICE), q)
    assert wrong.max() <= 1, f"{wrong.max()} times the limit with {case.label}"


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_random_trees(dtype, kind):
    case = branched(ROWS[kind], dtype)
    backend = backend_of(case, WIDEST[kind])
    assert isinstance(backend, BranchingBackend)
    step, _, _ = ragged.prepared(case, backend, case.q(1), device=DEVICE)
    assert (step.attn.many is None) == (kind != "many")
    if kind != "many":
        assert step.attn.few.queries == (8 if kind == "few" else 32)
    check(case, backend)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("options", [{"soft_cap": 5.0, "sinks": True}, {"heads": (1, 3), "head_dim": 96}], ids=str)
def test_caps_sinks_and_shapes(options, kind):
    case = branched(ROWS[kind], HALF, **options)
    q = case.q(1)
    wrong = errors(case, ragged.run(case, backend_of(case, WIDEST[kind]), q, device=DEVICE), q)
    assert wrong.max() <= 1, case.label


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(
    "form",
    [None, torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=[pytest.mark.slow] * (not GPU))],
    ids=str,
)
def test_from_the_projection(form, kind):
    """Rows with many queries take this step's keys as they were projected; all others come from the cache."""
    case = branched(ROWS[kind] if GPU else ROWS[kind][1:4], HALF, heads=(1, 2), soft_cap=20.0)
    check_fused(case, form, backend=backend_of(case, WIDEST[kind]))


@pytest.mark.parametrize("kind", ["few", "wide"])
@pytest.mark.parametrize("splits", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_context_in_parts(monkeypatch, splits, kind):
    """Also where a row's own tokens are in several parts."""
    monkeypatch.setattr(triton_few, "num_splits", lambda *_: splits)
    case = branched(ROWS[kind])
    check(case, backend_of(case, WIDEST[kind]))


@pytest.mark.parametrize("most", [8, 24])
def test_contexts_of_unequal_lengths(most, monkeypatch):
    """One long context is divided into many parts."""
    if not GPU:
        monkeypatch.setattr(triton_few, "_multiprocessors", lambda device: 6)
        monkeypatch.setattr(triton_plan, "LEAST", 16)
    launched = []
    launch = triton_plan.launch
    monkeypatch.setattr(triton_plan, "launch", lambda *args: launched.append(launch(*args)))
    lengths = [LONGEST, 20, 33, 64, 1, 40] * (40 if GPU else 1)
    case = branched([(length, min(length, most)) for length in lengths], HALF, heads=(2, 4), head_dim=64)
    check_fused(case, None, backend=backend_of(case, most))
    assert launched


@pytest.mark.parametrize("kind", ROWS)
def test_a_mask_that_is_ignored_is_noticed(kind):
    """By the tokens that it is for, and by no others."""
    case = branched(ROWS[kind])
    backend, q = backend_of(case, WIDEST[kind]), case.q(1)
    step, cache, there = ragged.prepared(case, backend, q, device=DEVICE)
    step.unseen = None
    wrong = errors(case, backend.attend(there, cache, step, case.spec), q)
    assert wrong[case.unseen == 0].max() <= 1
    assert wrong[case.unseen != 0].max() > 5


@pytest.mark.parametrize("fused", [False, True], ids=["from the cache", "from the projection"])
@pytest.mark.parametrize("kind", ROWS)
def test_without_branches_nothing_changes(kind, fused):
    """A step whose words are all zero has the same results, bit for bit, as one without them."""
    case = ragged.make_case(fresh_seed(), HALF, rows=ROWS[kind][1:4], **PLAIN)
    backend, q = backend_of(case, WIDEST[kind]), case.q(1)
    outs = []
    for words in (None, torch.zeros(len(q), dtype=torch.int32, device=DEVICE)):
        step, cache, there = ragged.prepared(case, backend, q, device=DEVICE)
        step.unseen = words
        if fused:
            parts = [torch.cat([getattr(s, name)[s.length - s.queries :] for s in case.sequences]) for name in "kv"]
            qkv = torch.cat([q, *parts], dim=1).to(DEVICE)
            still = torch.tensor([[1.0] * 16 + [0.0] * 16], device=DEVICE).expand(LONGEST, 32).contiguous()
            outs.append(backend.rotate_and_attend(qkv, None, still, cache, None, step, case.spec))
        else:
            outs.append(backend.attend(there, cache, step, case.spec))
    assert torch.equal(*outs)


@pytest.mark.parametrize("lens", [[5, 2, 1], [7, 1], [5, 3], [12, 1, 7], [2, 18], [18, 2]], ids=str)
def test_rows_in_pieces(lens):
    """As a step's part has them: a piece's queries need not see all keys before it. These are in two tiles of keys."""
    count = sum(lens)
    case = branched([(68, count)])
    backend, q = backend_of(case, 8), case.q(1)
    step, cache, there = ragged.prepared(case, backend, q, device=DEVICE)
    ends = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    piece = step.part(
        slice(0, count),
        torch.zeros(len(lens), dtype=torch.int32, device=DEVICE),
        query_start=ends.to(DEVICE),
        query_lens=lens,
        seq_lens=(68 - count + ends[1:]).to(DEVICE),
        past_lens=None,
    )
    piece.attn = backend.prepare(piece, case.block_size)
    wrong = errors(case, backend.attend(there, cache, piece, case.spec), q)
    assert wrong.max() <= 1, f"{wrong} with {case.label}"


def test_libraries_do_not_attend_drafts_that_branch():
    class Deaf:
        name = "deaf"

    case = branched([(20, 1), (90, 40), (12, 12)])
    backend = LibraryAttention(Deaf(), TritonAttention(case.dtype, case.spec))
    assert isinstance(backend, BranchingBackend)
    check(case, backend)


@pytest.mark.parametrize(
    ("heads", "group", "dim", "queries", "most"),
    [
        (1, 1, 64, 5, 8),
        (1, 1, 64, 9, 16),
        (2, 4, 128, 31, 32),
        (1, 3, 128, 31, 32),
        (1, 8, 128, 16, 16),
        (1, 8, 128, 17, 8),
        (1, 8, 256, 16, 8),
        (1, 4, 256, 16, 16),
        (1, 64, 64, 9, 8),
    ],
)
def test_rows_that_fit_one_tile_are_few(heads, group, dim, queries, most):
    backend = TritonAttention(HALF, AttentionSpec(heads * group, heads, dim, 0.1))
    assert (backend.most_few, backend.branches) == (8, False)
    backend.widen(queries)
    assert (backend.most_few, backend.branches) == (most, True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_and_values_move(dtype):
    """All are read before any is written, so that chains of cells and exchanges are right; others stay."""
    rng = random.Random(fresh_seed())
    backend = TritonAttention(HALF, AttentionSpec(6, 3, 32, 0.1))
    layers, blocks, page = 3, 7, 8
    shape = layers, *backend.cache_shape(AttentionSpec(6, 3, 32, 0.1), blocks, page)
    caches = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31))).to(dtype).to(DEVICE)
    before = caches.float().clone()
    targets = rng.sample(range(blocks * page), 20)
    sources = [*targets[10:15], *(rng.randrange(blocks * page) for _ in range(10)), *targets[15:]]
    backend.move(caches, *(torch.tensor(cells, device=DEVICE) for cells in (sources, targets)))
    expected = before.clone()
    for source, target in zip(sources, targets, strict=True):
        for layer in range(layers):
            moved = before[layer, source // page, :, :, source % page]
            expected[layer, target // page, :, :, target % page] = moved
    assert torch.equal(caches.float(), expected)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    backend.move(caches, nothing, nothing)
    assert torch.equal(caches.float(), expected)


@pytest.mark.skipif(not GPU, reason="records a CUDA graph")
def test_moves_can_be_recorded():
    backend = TritonAttention(HALF, AttentionSpec(2, 1, 32, 0.1))
    caches = torch.randn(2, *backend.cache_shape(AttentionSpec(2, 1, 32, 0.1), 3, 8), device=DEVICE)
    before = caches.clone()
    sources, targets = torch.tensor([1, 9], device=DEVICE), torch.tensor([2, 3], device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    backend.move(caches, targets, targets)
    with torch.cuda.graph(graph):
        backend.move(caches, sources, targets)
    assert torch.equal(caches, before)
    graph.replay()
    assert torch.equal(caches[:, 0, :, :, 2], before[:, 0, :, :, 1])
    assert torch.equal(caches[:, 0, :, :, 3], before[:, 1, :, :, 1])
