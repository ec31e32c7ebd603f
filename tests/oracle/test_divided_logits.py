"""Ranks that exchange the most likely tokens of their logits draw what they would draw from all logits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from rank_kit import ThreadCollectives
from torch import Tensor

from octavo.core.params import SamplingParams
from octavo.nn.divided import DividedLogits
from octavo.parallel.mesh import Mesh
from octavo.sampling.sampler import RowSampler
from octavo.sampling.state import PreparedParams, SampleRow

VOCAB = 96
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.6, "top_k": 1},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.5},
]


class Counted(ThreadCollectives):
    """Counts the bytes that a rank sends."""

    sent = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent += x.nbytes
        return super().all_gather(x)


def on_ranks(logits: Tensor, size: int, work: Callable[[DividedLogits], Any]) -> tuple[list[Any], int]:
    """Return the results of all ranks, and the bytes that one of them sends."""
    barrier, given = threading.Barrier(size), [torch.empty(0)] * size
    groups = [Counted(rank, barrier, given) for rank in range(size)]
    parts = [
        DividedLogits(part.contiguous(), Mesh(rank, size, groups[rank]))
        for rank, part in enumerate(logits.chunk(size, dim=1))
    ]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, parts)), groups[0].sent


def logits_of(kind: str, rows: int, seed: int) -> Tensor:
    made = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        made = made.round()
    if kind == "all equal":
        made = torch.zeros_like(made)
    if kind == "masked":
        made[:, 5:] = float("-inf")
    if kind == "bad":
        made[::2, 70] = float("nan")
        made[1::2, 3] = float("inf")
    return made


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "masked", "bad"])
def test_tokens_are_those_of_all_logits(kind: str, size: int) -> None:
    for seed in range(8):
        params = [PreparedParams.make(SamplingParams(**SAMPLED[seed % 5 or i]), seed + i, [], VOCAB) for i in range(5)]
        rows = [SampleRow(one, np.arange(4, dtype=np.int32), 2) for one in params]
        count = max(one.num_candidates for one in params)
        assert all(one.num_candidates for one in params)
        logits = logits_of(kind, len(rows), seed)
        expected = RowSampler().sample(logits, rows)
        for most_likely in on_ranks(logits, size, lambda parts, n=count: parts.most_likely(n))[0]:
            one = RowSampler().sample(most_likely, rows)
            assert one.bad_rows == expected.bad_rows
            assert one.tokens.tolist() == expected.tokens.tolist()


def test_bytes_sent_are_those_of_the_candidates() -> None:
    logits = logits_of("random", 3, 0)
    assert on_ranks(logits, 2, lambda parts: parts.most_likely(1))[1] == 3 * 8
    assert on_ranks(logits, 2, lambda parts: parts.most_likely(5))[1] == 3 * 8 * 6
    assert on_ranks(logits, 2, lambda parts: parts.whole())[1] == 3 * 4 * VOCAB // 2


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 300},
        {"temperature": 1.0, "top_k": 5, "logprobs": 0},
        {"temperature": 1.0, "top_k": 5, "presence_penalty": 0.5},
        {"temperature": 1.0, "top_k": 5, "allowed_token_ids": [3, 4]},
        {"temperature": 1.0, "top_k": 5, "min_tokens": 2},
        {"temperature": 0, "logit_bias": {3: 1.0}},
    ],
)
def test_rows_that_need_all_logits(params: dict[str, Any]) -> None:
    assert PreparedParams.make(SamplingParams(**params), 0, [7], 1000).num_candidates == 0


class Recorded:
    """A group whose ranks run one after the other: the last run finds what the runs before have sent."""

    def __init__(self, sent: dict[int, Tensor], rank: int, size: int) -> None:
        self.sent, self.rank, self.size = sent, rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is summed")

    def all_gather(self, x: Tensor) -> Tensor:
        self.sent[self.rank] = x.clone()
        return torch.stack([self.sent.get(rank, x) for rank in range(self.size)])


@pytest.mark.parametrize("kind", ["random", "ties", "bad"])
def test_a_gpu_draws_the_same(kind: str) -> None:
    """Greedily, and with noise, which depends on a token's number in the whole vocabulary."""
    pytest.importorskip("triton")
    from octavo.sampling.parameters import packed_words
    from octavo.sampling.resident import ParamTable, ResidentSampler

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    params = [PreparedParams.make(SamplingParams(temperature=t), 7 + i, [], VOCAB) for i, t in enumerate((0, 0.7, 1.5))]
    words = torch.from_numpy(np.stack([packed_words(one, 2) for one in params])).to(device)
    table = ParamTable(words, torch.zeros(3, 8, dtype=torch.int32, device=device), torch.tensor([3, 4, 5]).int())
    table = ParamTable(table.params, table.tokens, table.length.to(device))
    sampler = ResidentSampler(table, VOCAB)
    slots = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    logits = logits_of(kind, 3, 1).to(device)
    expected = sampler.draw(logits, slots).tolist()
    sent: dict[int, Tensor] = {}
    for rank in (0, 1, 0):
        mesh = Mesh(rank, 2, Recorded(sent, rank, 2))
        own = DividedLogits(logits.chunk(2, dim=1)[rank].contiguous(), mesh)
        found = sampler.draw_divided(own, slots).tolist()
        if len(sent) == 2:
            assert found == expected
