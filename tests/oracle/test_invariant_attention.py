"""Attention whose bits do not depend on the batch: against float64, and alone against together (on a GPU)."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest
import ragged
import torch

pytest.importorskip("triton")

from octavo.nn.attention import invariant
from octavo.nn.attention.invariant import InvariantAttention

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
# The interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if GPU else torch.float16
LONGEST = 20_000 if GPU else 150
ROWS = {
    "few": [(1, 1), (2, 1), (31, 1), (64, 1), (100, 1), (LONGEST, 1)],
    "many": [(1, 1), (LONGEST, 40), (33, 33), (5, 2), (130, 130), (70, 9)],
    "drafts": [(1, 1), (9, 4), (LONGEST, 3), (64, 2), (3, 3)],
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts in each context, without a GPU, too."""
    if not GPU:
        monkeypatch.setattr(invariant, "PART", 64)


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def check(case: ragged.Case) -> None:
    q = case.q(len(case.label))
    got = ragged.run(case, InvariantAttention(case.dtype, case.spec), q, device=DEVICE)
    assert got.dtype == q.dtype
    expected = case.expected(q)
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs())
    limit = ragged.TOLERANCE[case.dtype]
    assert bool((wrong <= limit).all()), f"off by {wrong.nan_to_num(torch.inf).max()} with {case.label}"


@pytest.mark.parametrize("rows", list(ROWS.values()), ids=list(ROWS))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256] if GPU else [64, 96])
@pytest.mark.parametrize("heads", [(1, 3), (2, 1), (1, 8)] if GPU else [(1, 3)], ids=str)
def test_shapes(heads, head_dim, rows):
    block_size = random.Random(head_dim).choice([8, 16, 32, 64])
    check(ragged.make_case(fresh_seed(), HALF, heads=heads, head_dim=head_dim, block_size=block_size, rows=rows))


@pytest.mark.parametrize("rows", list(ROWS.values()), ids=list(ROWS))
@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"window": 64, "chunked": True},
        {"soft_cap": 5.0},
        {"sinks": True},
        {"biased": True},
        {"mutual": True},
    ],
    ids=str,
)
def test_kinds_of_attention(options, rows):
    check(ragged.make_case(fresh_seed(), HALF, heads=(2, 2), head_dim=64, block_size=16, rows=rows, **options))


def _alone(case: ragged.Case, number: int, queries: int) -> ragged.Case:
    """One sequence, which computes its last tokens in this step."""
    one = case.sequences[number]
    return dataclasses.replace(case, sequences=[dataclasses.replace(one, queries=queries)])


@pytest.mark.skipif(not GPU, reason="the interpreter multiplies in the order of another library")
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"sinks": True, "soft_cap": 9.0}], ids=str)
@pytest.mark.parametrize("heads", [(8, 4), (2, 1), (1, 7)], ids=str)
def test_bits_depend_on_nothing_else(heads, options):
    rows = [(1, 1), (3000, 300), (1100, 1), (65, 65), (20_000, 1), (2049, 5), (5000, 130), (1024, 1)]
    case = ragged.make_case(fresh_seed(), HALF, heads=heads, head_dim=128, block_size=16, rows=rows, **options)
    backend, q = InvariantAttention(case.dtype, case.spec), case.q(3)
    together = ragged.run(case, backend, q, device=DEVICE)
    start = 0
    for number, (_, queries) in enumerate(rows):
        mine = slice(start, start + queries)
        start += queries
        for last in {1, min(queries, 7), queries}:
            own = _alone(case, number, last)
            got = ragged.run(own, backend, q[mine][-last:], device=DEVICE)
            assert torch.equal(got, together[mine][-last:]), f"row {number}, its last {last}: {case.label}"
