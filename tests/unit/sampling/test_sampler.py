"""The sampler against a plain one, and against itself in other company."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import plain_sampler
import pytest
import torch
from chi_square import chi_square
from msgspec.structs import replace

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.sampling.processors import process
from octavo.sampling.sampler import RowSampler
from octavo.sampling.state import PreparedParams, SampleRow

VOCAB = 3000


def fresh_rng() -> tuple[random.Random, str]:
    seed = int.from_bytes(os.urandom(4), "little")
    return random.Random(seed), f"rng seed {seed}"


def make_row(params: SamplingParams, *, seed=0, stops=(), prompt=(1,), output=(), vocab=VOCAB) -> SampleRow:
    prepared = PreparedParams.make(params, seed, list(stops), vocab)
    tokens = np.array([*prompt, *output], dtype=np.int32)
    return SampleRow(prepared, tokens, len(prompt))


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    return SamplingParams(
        temperature=maybe(rng.choice([0.0, 0.05, 0.7, 1.0, 2.0]), 1.0),
        top_k=maybe(rng.choice([-1, 1, 2, 40, 63, 64, 65, 500, vocab - 1, vocab, vocab + 9]), 0),
        top_p=maybe(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.99, 0.9999]), 1.0),
        min_p=maybe(rng.choice([1e-6, 0.01, 0.1, 0.5, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        frequency_penalty=maybe(rng.choice([-2.0, 0.3, 2.0]), 0.0),
        presence_penalty=maybe(rng.choice([-1.5, 0.4]), 0.0),
        logit_bias=maybe({rng.randrange(vocab): rng.choice([-1000.0, -3.0, 4.0]) for _ in range(5)}, None),
        min_tokens=maybe(rng.randint(1, 8), 0),
        max_tokens=None,
        **rng.choice([{}, {"logprobs": rng.choice([0, 1, 5, 20])}, {"logprob_token_ids": rng.sample(range(vocab), 3)}]),
        allowed_token_ids=rng.sample(range(vocab), vocab // 2) if rng.random() < 0.2 else None,
        bad_token_ids=[[rng.randrange(vocab)], [7, rng.randrange(vocab)]] if rng.random() < 0.3 else None,
    )


def random_logits(rng: random.Random, vocab: int) -> torch.Tensor:
    """Rows peaked and flat, with many equal values, and with impossible tokens."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(vocab, generator=generator) * rng.choice([0.0, 0.1, 2.0, 8.0])
    kind = rng.random()
    if kind < 0.4:
        logits = logits.bfloat16().float()
    elif kind < 0.6:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[torch.rand(vocab, generator=generator) < rng.choice([0.1, 0.99])] = -math.inf
        logits[rng.randrange(vocab)] = 1.0
    return logits


def random_row(rng: random.Random, vocab: int) -> tuple[torch.Tensor, SampleRow, dict]:
    facts = {
        "params": random_params(rng, vocab),
        "seed": rng.randrange(-(2**63), 2**64),
        "stops": [rng.randrange(vocab) for _ in range(2)],
        "prompt": [rng.randrange(-1, vocab) for _ in range(rng.randint(1, 30))] + [-1] * (rng.random() < 0.3),
        "output": [rng.randrange(vocab) for _ in range(rng.randint(0, 12))] * rng.randint(1, 3),
    }
    row = make_row(
        facts["params"],
        seed=facts["seed"],
        stops=facts["stops"],
        prompt=facts["prompt"],
        output=facts["output"],
        vocab=vocab,
    )
    return random_logits(rng, vocab), row, facts


@pytest.mark.parametrize("vocab", [7, 100, 3000, 4096])
def test_agrees_with_the_plain_sampler(vocab):
    rng, label = fresh_rng()
    batch = [random_row(rng, vocab) for _ in range(60)]
    logits = torch.stack([x for x, _, _ in batch])
    untouched = logits.clone()
    result = RowSampler().sample(logits, [row for _, row, _ in batch])
    assert torch.equal(logits, untouched)
    for i, (x, _, facts) in enumerate(batch):
        where = f"{label} row {i} {facts}"
        params = facts["params"]
        expected = plain_sampler.processed(x.tolist(), params, facts["stops"], facts["prompt"], facts["output"])
        token = int(result.tokens[i])
        if max(expected) == -math.inf:
            assert i in result.bad_rows, where
            continue
        assert i not in result.bad_rows, where
        if params.greedy:
            assert expected[token] >= max(expected) - 1e-4, where
            continue
        number = plain_sampler.splitmix_uniform(facts["seed"], len(facts["output"]))
        # float32 logits may rank differently from float64 ones where penalties made them nearly equal.
        exact = not params.has_penalties
        # Where equal tokens add up to top_p, such as 5 of 50 to 0.1, rounding decides whether the next one is kept.
        near = [replace(params, top_p=min(1.0, params.top_p * factor)) for factor in (1.0, 1 - 1e-6, 1 + 1e-6)]
        places = [plain_sampler.interval(_as_float32(expected), one, token) for one in near]
        slack = 1e-5 + vocab * 2**-24  # rounding of a float32 sum over the vocabulary
        found = any(low < high and low - slack <= number <= high + slack for low, high in places)
        assert found or not exact, f"{where}: {number} not in {places}"


def _as_float32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).float().tolist()


def test_the_place_of_an_embedding_is_no_token_to_penalize():
    rows = [make_row(SamplingParams(repetition_penalty=2.0), prompt=(5, -1, -1), vocab=9) for _ in range(3)]
    logits = torch.ones(3, 9)
    process(logits, rows)
    assert logits.tolist() == [[1, 1, 1, 1, 1, 0.5, 1, 1, 1]] * 3


def test_a_row_does_not_depend_on_its_neighbours():
    rng, label = fresh_rng()
    batch = [random_row(rng, VOCAB) for _ in range(40)]
    alone = [RowSampler().sample(x[None], [row]) for x, row, _ in batch]
    for size in (2, 3, 17, 40):
        order = rng.sample(range(len(batch)), size)
        result = RowSampler().sample(torch.stack([batch[i][0] for i in order]), [batch[i][1] for i in order])
        for place, i in enumerate(order):
            where = f"{label} row {i} of {size}"
            assert int(result.tokens[place]) == int(alone[i].tokens[0]), where
            assert result.logprobs.get(place) == alone[i].logprobs.get(0), where
            assert (place in result.bad_rows) == bool(alone[i].bad_rows), where


def test_the_same_token_after_other_work_on_another_number_of_threads():
    rng, label = fresh_rng()
    logits, row, _ = random_row(rng, 49152)
    before = torch.get_num_threads()
    tokens = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            tokens.add(int(RowSampler().sample(logits[None], [row]).tokens[0]))
    finally:
        torch.set_num_threads(before)
    assert len(tokens) == 1, label


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.5, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.2, min_p=0.2, top_k=6, top_p=0.9),
    ],
    ids=["all", "top_k", "top_p", "every filter"],
)
def test_frequencies_follow_the_probabilities(params):
    """Chi-square over positions of one seed; the seed is fixed, so the outcome is too."""
    logits = torch.tensor([1.0, 0.2, 2.0, -1.0, 0.5, 1.0, 3.0, -0.3])
    count = 4000
    prepared = PreparedParams.make(params, 1234, [], len(logits))
    tokens = np.zeros(count, dtype=np.int32)
    rows = [SampleRow(prepared, tokens[: i + 1], 1) for i in range(count)]
    drawn = torch.bincount(RowSampler().sample(logits.expand(count, -1), rows).tokens, minlength=len(logits))
    expected = dict(plain_sampler.kept(logits.tolist(), params))
    assert set(torch.nonzero(drawn).flatten().tolist()) == set(expected)
    # The 99.9 % point of chi-square with 7 degrees of freedom; with fewer it is lower.
    assert chi_square(drawn.tolist(), [count * expected.get(i, 0.0) for i in range(len(logits))]) < 24.3


def test_choices_of_one_request_differ():
    params = SamplingParams(temperature=1.0)
    rows = [make_row(params, seed=7 + i) for i in range(50)]
    tokens = RowSampler().sample(torch.zeros(50, VOCAB), rows).tokens
    assert len(set(tokens.tolist())) > 40


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.zeros(3, VOCAB)
    logits[1, [5, 900]] = 2.0
    logits[2, VOCAB - 1] = 1.0
    rows = [make_row(SamplingParams(temperature=0)) for _ in range(3)]
    assert RowSampler().sample(logits, rows).tokens.tolist() == [0, 5, VOCAB - 1]
    rows = [make_row(SamplingParams(temperature=0, logprobs=2)) for _ in range(3)]
    result = RowSampler().sample(logits, rows)
    assert result.tokens.tolist() == [0, 5, VOCAB - 1]
    assert result.logprobs[1].top_ids == [5, 900]
    assert result.logprobs[1].rank == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(dtype):
    rng, label = fresh_rng()
    logits = torch.randint(-3, 4, (20, 65), generator=torch.Generator().manual_seed(rng.randrange(2**31))).to(dtype)
    assert torch.equal(RowSampler().greedy(logits).tokens, logits.argmax(-1)), label


@pytest.mark.parametrize("others", ["plain", "mixed"])
def test_rows_that_cannot_be_sampled_are_named_and_harm_no_other(others):
    rng, label = fresh_rng()
    greedy = SamplingParams(temperature=0)
    drawn = greedy if others == "plain" else SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    rows = [make_row(drawn if i % 2 else greedy, seed=i) for i in range(6)]
    clean = RowSampler().sample(logits, rows)
    broken = logits.clone()
    broken[1, 17] = math.nan
    broken[2] = -math.inf
    broken[3, 5] = math.inf
    broken[4, 100:] = -math.inf
    result = RowSampler().sample(broken, rows)
    assert result.bad_rows == [1, 2, 3], label
    assert result.tokens[[1, 2, 3]].tolist() == [0, 0, 0]
    for i in (0, 5):
        assert int(result.tokens[i]) == int(clean.tokens[i])
        assert result.logprobs.get(i) == clean.logprobs.get(i)
    assert int(result.tokens[4]) < 100
    assert not {1, 2, 3} & result.logprobs.keys()


def test_a_ban_on_every_token_is_a_bad_row():
    row = make_row(SamplingParams(temperature=1.0, min_tokens=2), stops=range(5), vocab=5)
    assert RowSampler().sample(torch.zeros(1, 5), [row]).bad_rows == [0]


def test_stop_tokens_are_free_once_there_are_enough():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 50.0
    params = SamplingParams(temperature=0, min_tokens=3)
    for count, expected in ((0, 0), (2, 0), (3, 9)):
        row = make_row(params, stops=[9, VOCAB + 5], output=[4] * count)
        assert int(RowSampler().sample(logits, [row]).tokens[0]) == expected


def test_bias_is_clamped_and_checked():
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 150.0
    row = make_row(SamplingParams(temperature=0, logit_bias={3: -1000.0}))
    assert int(RowSampler().sample(logits, [row]).tokens[0]) == 3
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        make_row(SamplingParams(logit_bias={VOCAB: 1.0}))


def test_logprobs_are_of_the_raw_logits():
    rng, label = fresh_rng()
    logits = random_logits(rng, VOCAB).bfloat16()[None]
    logits[0, 11] = -1.0
    row = make_row(SamplingParams(temperature=1.7, top_k=30, logit_bias={11: 100.0}, logprobs=20), seed=3)
    result = RowSampler().sample(logits, [row])
    got, token = result.logprobs[0], int(result.tokens[0])
    expected = logits[0].double().log_softmax(-1)
    ranked = sorted(range(VOCAB), key=lambda i: (-float(logits[0, i]), i))
    assert token == 11, label
    assert got.logprob == pytest.approx(float(expected[token]), abs=1e-4), label
    assert got.rank == 1 + int((logits[0] > logits[0, token]).sum()), label
    assert got.top_ids == ranked[:20], label
    assert got.top_logprobs == pytest.approx(expected[ranked[:20]].tolist(), abs=1e-4), label


def test_logprobs_of_named_tokens_beside_others():
    logits = random_logits(random.Random(5), VOCAB).repeat(4, 1)
    named = ([3, 2900, 7], [8, 9, 10], [11])
    rows = [make_row(SamplingParams(temperature=0, logprob_token_ids=one)) for one in named]
    result = RowSampler().sample(logits, [*rows, make_row(SamplingParams(temperature=0, logprobs=3))])
    expected = logits[0].double().log_softmax(-1)
    for row, one in enumerate(named):
        assert result.logprobs[row].top_ids == one
        assert result.logprobs[row].top_logprobs == pytest.approx(expected[one].tolist(), abs=1e-4)
        assert result.logprobs[row].rank == 1
    assert result.logprobs[3].top_ids == logits[0].topk(3).indices.tolist()
