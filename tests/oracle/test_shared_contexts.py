"""Contexts that begin with the same blocks are read once for all who decode over them; nobody's result shows it."""

from __future__ import annotations

import os
import random

import pytest
import ragged
import torch
from test_attention_invariance import INT8, native, one


def family(rng: random.Random, dtype: torch.dtype, **options) -> ragged.Case:
    """Rows of which each begins like one before it, as a tree of prompts does, with strangers and chunks among them."""
    rows = [(rng.randint(500, 2300), rng.choice([1, 1, 1, 1, 2, 9])) for _ in range(rng.randint(4, 22))]
    heads, head_dim = rng.choice([(3, 3), (1, 8), (2, 1)]), rng.choice([32, 48])
    block_size = rng.choice([16, 32, 48])
    case = ragged.make_case(
        rng.randrange(2**32), dtype, rows=rows, heads=heads, head_dim=head_dim, block_size=block_size, **options
    )
    for place, taker in enumerate(case.sequences[1:], 1):
        if rng.random() < 0.8:
            ragged.share(taker, case.sequences[rng.randrange(place)], rng.choice([1.0, 1.0, rng.random()]), block_size)
    return case


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@INT8
def test_rows_that_share_are_the_same_as_alone_bit_for_bit(dtype, window, int8):
    rng = random.Random(os.urandom(8))
    case = family(rng, dtype, window=window, soft_cap=rng.choice([None, 20.0]))
    q = case.q(1)
    backend = native(int8=int8)
    together, expected = ragged.run(case, backend, q), case.expected(q, int8=int8)
    limit = ragged.tolerance(dtype, backend)
    torch.testing.assert_close(together.double(), expected, atol=limit, rtol=limit, msg=case.label)
    start = 0
    for row, sequence in enumerate(case.sequences):
        mine = slice(start, start + sequence.queries)
        assert torch.equal(ragged.run(one(case, row), native(int8=int8), q[mine]), together[mine]), case.label
        start = mine.stop
