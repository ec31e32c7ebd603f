"""Sampling on the device against plain definitions, on the GPU or under the interpreter."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from chi_square import chi_square
from torch import Tensor

pytest.importorskip("triton")

from octavo.core.params import SamplingParams
from octavo.sampling.allowed import Allowed, forbid, num_words
from octavo.sampling.parameters import NUM_PARAMS, packed_words
from octavo.sampling.processors import process
from octavo.sampling.resident import ParamTable, ResidentRow, ResidentSampler
from octavo.sampling.state import PreparedParams, SampleRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 5000


class Rows:
    """Some slots with random tokens, each with its own parameters; slot i + 1 is row i."""

    def __init__(self, params: list[SamplingParams], vocab: int = VOCAB, seeds: list[int] | None = None) -> None:
        rng = random.Random(int.from_bytes(os.urandom(4), "little"))
        seeds = seeds or [rng.getrandbits(62) for _ in params]
        self.prepared = [PreparedParams.make(p, seed, [2], vocab) for p, seed in zip(params, seeds, strict=True)]
        count = len(params) + 1
        self.lengths = [0] + [rng.randrange(5, 60) for _ in params]
        self.prompts = [0] + [rng.randrange(1, length) for length in self.lengths[1:]]
        self.tokens = torch.from_numpy(np.random.default_rng().integers(0, vocab, (count, 64), dtype=np.int32))
        self.tokens[:, ::3] = 7
        for slot, prompt in enumerate(self.prompts):
            self.tokens[slot, 1:prompt:4] = -1  # embeddings
        packed = np.zeros((count, NUM_PARAMS), dtype=np.int32)
        for i, prepared in enumerate(self.prepared):
            packed[i + 1] = packed_words(prepared, self.prompts[i + 1])
        length = torch.tensor(self.lengths, dtype=torch.int32)
        table = ParamTable(torch.from_numpy(packed).to(DEVICE), self.tokens.to(DEVICE), length.to(DEVICE))
        self.sampler = ResidentSampler(table, vocab)
        self.slots = torch.arange(1, count, dtype=torch.int32, device=DEVICE)
        self.rows = [
            ResidentRow(i + 1, p, self.prompts[i + 1], self.lengths[i + 1]) for i, p in enumerate(self.prepared)
        ]

    def on_cpu(self) -> list[SampleRow]:
        return [
            SampleRow(p, self.tokens[i + 1, : self.lengths[i + 1]].numpy(), self.prompts[i + 1])
            for i, p in enumerate(self.prepared)
        ]


def some_logits(rows: int, vocab: int = VOCAB) -> Tensor:
    """With many ties, as bfloat16 has."""
    return (torch.randn(rows, vocab) * 3).to(torch.bfloat16).float()


def kept_by_sorting(logits: Tensor, params: PreparedParams) -> set[int]:
    """min_p, then top_k, then top_p, by their definitions in float64."""
    temperature, top_k, top_p, min_p = params.filters.tolist()
    order = logits.sort(descending=True, stable=True).indices
    weights = ((logits.double() - logits.max()) / temperature).exp()[order]
    kept = int((weights >= min_p).sum())
    kept = min(kept, int(top_k)) if top_k else kept
    before = weights[:kept].cumsum(0) - weights[:kept]
    kept = max(1, int((before < top_p * weights[:kept].sum()).sum())) if top_p < 1 else kept
    return set(order[:kept].tolist())


FILTERS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.03},
    {"top_k": 40, "top_p": 0.95},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 5000},
    {"top_k": 4500},
    {"top_k": 4500, "top_p": 0.99},
    {"top_p": 0.999},
]


QUICK = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.03}, {"top_k": 40, "top_p": 0.95}, {"top_k": 300}]


@pytest.mark.parametrize(
    ("few", "vocab", "filters", "temperatures"),
    [
        (False, VOCAB, FILTERS, (0.3, 1.0)),
        pytest.param(True, VOCAB, FILTERS, (1.0,), marks=pytest.mark.slow),
        (True, 40_000, QUICK, (0.3,)),
    ],
)
def test_what_filters_keep(few, vocab, filters, temperatures):
    params = [SamplingParams(temperature=t, **f) for f in filters for t in temperatures]
    rows = Rows(params, vocab)
    logits = some_logits(len(params), vocab)
    kept = rows.sampler.kept(logits.to(DEVICE), rows.slots, few=few)
    if few:
        whole = rows.sampler.kept(logits.to(DEVICE), rows.slots, few=False)
        tokens = rows.sampler.draw(logits.to(DEVICE), rows.slots, whole)
        quick = kept.drawn > -2
        assert quick.any()
        assert kept.drawn[quick].tolist() == tokens[quick].tolist()
    floors, ties = kept.floors.cpu(), kept.ties.cpu()
    ids = torch.arange(vocab)
    for i, prepared in enumerate(rows.prepared):
        kept = (logits[i] > floors[i]) | ((logits[i] == floors[i]) & (ids <= ties[i]))
        expected = kept_by_sorting(logits[i], prepared)
        got = set(ids[kept].tolist())
        # float32 sums may settle a token at the very edge of top_p the other way.
        assert len(got ^ expected) <= (params[i].top_p < 1) * max(1, len(expected) // 500), (params[i], len(got))


def test_processors_are_those_of_the_cpu():
    params = [
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingParams(temperature=0, repetition_penalty=0.7, presence_penalty=1.0, logit_bias={7: 3.5, 11: -2.0}),
        SamplingParams(temperature=0, min_tokens=1000, max_tokens=2000, logit_bias={2: 100}),
        SamplingParams(temperature=0),
    ]
    rows = Rows(params)
    logits = some_logits(len(params))
    expected = logits.clone()
    process(expected, rows.on_cpu())
    work = logits.to(DEVICE, copy=True)
    rows.sampler._bias(work, rows.rows)
    rows.sampler._ban(work, rows.rows)
    rows.sampler._penalize(work, rows.slots, rows.rows)
    torch.testing.assert_close(work.cpu(), expected, atol=1e-5, rtol=1e-5)
    assert not rows.sampler._counts.any()
    tokens, _ = rows.sampler.sample(logits.to(DEVICE), rows.slots, rows.rows)
    assert tokens.tolist() == expected.argmax(-1).tolist()


def test_draws_follow_the_softmax():
    """A chi-square far above its mean of 15 would be no chance: 60 has a probability of 2e-7."""
    count, vocab, temperature = 400 if DEVICE.type == "cpu" else 100_000, 16, 0.7
    rows = Rows([SamplingParams(temperature=temperature)] * count, vocab=vocab)
    logits = torch.randn(vocab)
    tokens = rows.sampler.draw(logits.expand(count, vocab).contiguous().to(DEVICE), rows.slots).cpu()
    observed = torch.bincount(tokens.long(), minlength=vocab)
    expected = (logits.double() / temperature).softmax(0) * count
    assert chi_square(observed.tolist(), expected.tolist()) < 60


def test_draws_depend_on_seed_and_position_alone():
    params = [SamplingParams(temperature=1.0)] * 4
    logits = torch.zeros(4, VOCAB)
    rows = Rows(params, seeds=[5, 5, 6, 5 + 2**33])
    rows.sampler._table.length[1:] = torch.tensor([9, 9, 9, 9], dtype=torch.int32)
    first = rows.sampler.draw(logits.to(DEVICE), rows.slots).tolist()
    assert first[0] == first[1]
    assert len(set(first)) == 3
    alone = rows.sampler.draw(logits[2:3].to(DEVICE), rows.slots[2:3]).tolist()
    assert alone == first[2:3]
    rows.sampler._table.length[1] = 10
    assert rows.sampler.draw(logits.to(DEVICE), rows.slots).tolist()[0] != first[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_first_of_equals_and_refuses_nonsense(dtype):
    logits = some_logits(4, 9000).to(dtype)
    logits[0, [17, 8000]] = 50.0
    logits[1, 8999] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    rows = Rows([SamplingParams(temperature=0)] * 4, vocab=9000)
    assert rows.sampler.draw(logits.to(DEVICE), rows.slots).tolist() == [17, -1, -1, -1]
    drawn = Rows([SamplingParams(temperature=0.1, top_k=5)] * 4, vocab=9000)
    tokens, _ = drawn.sampler.sample(logits.to(DEVICE), drawn.slots, drawn.rows)
    assert tokens.tolist()[0] in (17, 8000)
    assert tokens.tolist()[1:] == [-1, -1, -1]


def test_logprobs():
    params = [SamplingParams(temperature=0, logprobs=3), SamplingParams(temperature=0), SamplingParams(logprobs=0)]
    params += [SamplingParams(temperature=0, logprob_token_ids=named) for named in ([5, 2, 9], [1, 3, 4])]
    rows = Rows(params)
    logits = some_logits(5)
    tokens, groups = rows.sampler.sample(logits.to(DEVICE), rows.slots, rows.rows)
    found = {}
    for chosen, parts in groups:
        columns = [part.wait().tolist() for part in parts]
        found.update(dict(zip(chosen, zip(*columns, strict=True), strict=True)))
    assert sorted(found) == [0, 2, 3, 4]
    expected = logits.double().log_softmax(-1)
    for row, (logprob, rank, top_ids, top) in found.items():
        token = int(tokens[row])
        assert logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert rank == 1 + int((logits[row] > logits[row, token]).sum())
        named = params[row].logprob_token_ids
        best = named or logits[row].sort(descending=True, stable=True).indices[: params[row].logprobs].tolist()
        assert top_ids == best
        assert top == pytest.approx(expected[row, best].tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 40}, {"temperature": 0, "logprobs": 2}],
    ids=str,
)
def test_masks_are_as_if_the_logits_had_been_changed(settings):
    count = 5
    rows = Rows([SamplingParams(**settings)] * count)
    rng = np.random.default_rng()
    for masked in ([3, 0, 4], [1], []):
        words = rng.integers(-(2**31), 2**31, (len(masked), num_words(VOCAB)), dtype=np.int32)
        words &= rng.integers(0, 2, words.shape, dtype=np.int32) - 1  # many a word that allows nothing
        logits = some_logits(count)
        changed = logits.clone()
        forbid(changed, Allowed(masked, words))
        changed[changed == -torch.inf] = -3e38  # so that the other way knows of no minus infinity either
        with rows.sampler.allowing(Allowed(masked, words) if masked else None):
            tokens, reports = rows.sampler.sample(logits.to(DEVICE), rows.slots, rows.rows)
        with rows.sampler.allowing(None):
            expected, others = rows.sampler.sample(changed.to(DEVICE), rows.slots, rows.rows)
        assert tokens.tolist() == expected.tolist()
        for (_, one), (_, other) in zip(reports, others, strict=True):
            assert one[0].wait().tolist() == pytest.approx(other[0].wait().tolist(), abs=1e-4)


def test_a_row_in_which_nothing_is_possible_has_no_token():
    rows = Rows([SamplingParams(temperature=0), SamplingParams(temperature=1.0)])
    with rows.sampler.allowing(Allowed([0, 1], np.zeros((2, num_words(VOCAB)), dtype=np.int32))):
        tokens, _ = rows.sampler.sample(some_logits(2).to(DEVICE), rows.slots, rows.rows)
    assert tokens.tolist() == [-1, -1]
