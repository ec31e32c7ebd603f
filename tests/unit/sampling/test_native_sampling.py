"""The kernels' sampling, on each instruction set, against the plain sampler, and against itself in other company."""

from __future__ import annotations

import math
import random

import numpy as np
import plain_sampler
import pytest
import torch
from chi_square import chi_square
from levels import ISAS, needs_isa
from test_sampler import fresh_rng, random_logits, random_params

from octavo.core.params import SamplingParams
from octavo.native.isa import NAMES
from octavo.native.program import Pool
from octavo.native.sampling import sample
from octavo.sampling.allowed import Allowed, forbid, num_words
from octavo.sampling.parameters import STRUCT, packed
from octavo.sampling.state import PreparedParams


@pytest.fixture(scope="module", params=ISAS)
def pool(request):
    return Pool(2, needs_isa(request.param))


class Table:
    """Slots with one request each: its parameters, prompt and output."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.prepared: list[PreparedParams] = []
        self.rows: list[tuple[tuple, list[int]]] = []

    def add(self, params: SamplingParams, *, seed: int, stops=(), prompt=(1,), output=()) -> None:
        prepared = PreparedParams.make(params, seed, list(stops), self.vocab)
        self.prepared.append(prepared)
        self.rows.append((packed(prepared, len(prompt)), [*prompt, *output]))

    def sample(
        self, pool: Pool, logits: torch.Tensor, slots: list[int] | None = None, allowed: Allowed | None = None
    ) -> tuple[list[int], list[float]]:
        """`logits` are those of `slots`, all by default; they must come out as they went in."""
        chosen = list(range(len(self.rows))) if slots is None else slots
        sampling = np.zeros(len(self.rows), dtype=STRUCT)
        length = np.array([len(tokens) for _, tokens in self.rows])
        tokens = np.zeros((len(self.rows), max(length)), dtype=np.int32)
        for slot, (values, known) in enumerate(self.rows):
            sampling[slot] = values
            tokens[slot, : len(known)] = known
        before = logits.clone()
        masks = None if allowed is None else allowed.addresses(len(chosen))
        drawn, peaks = sample(
            pool, logits.data_ptr(), logits.stride(0), self.vocab, np.array(chosen), sampling, tokens, length, masks
        )
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        return drawn.tolist(), peaks.tolist()


def random_facts(rng: random.Random, vocab: int) -> dict:
    params = random_params(rng, vocab).replace(logprobs=None)
    if rng.random() < 0.7:
        params = params.replace(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    if params.greedy and rng.random() < 0.7:
        params = params.replace(temperature=1.5)
    return {
        "params": params,
        "seed": rng.randrange(-(2**63), 2**64),
        "stops": [rng.randrange(vocab) for _ in range(2)],
        "prompt": [rng.randrange(-1, vocab) for _ in range(rng.randint(1, 30))] + [-1] * (rng.random() < 0.3),
        "output": [rng.randrange(vocab) for _ in range(rng.randint(0, 12))] * rng.randint(1, 3)
        + [7 % vocab] * (rng.random() < 0.3),  # with which a bad word begins
    }


def drawn_for(number: float, kept: list[tuple[int, float]], token: int) -> bool:
    """Whether the number falls into the token's part of [0, 1), give or take float32's rounding."""
    mass = 0.0
    for candidate, probability in kept:
        if candidate == token:
            return mass - 1e-5 <= number <= mass + probability + 1e-5
        mass += probability
    return False


@pytest.mark.parametrize("vocab", [7, 100, 3000, 5003])
def test_agrees_with_the_plain_sampler(pool, vocab):
    rng, label = fresh_rng()
    table, facts = Table(vocab), [random_facts(rng, vocab) for _ in range(60)]
    for one in facts:
        table.add(**one)
    logits = torch.stack([random_logits(rng, vocab) for _ in facts])
    tokens, peaks = table.sample(pool, logits)
    for i, one in enumerate(facts):
        where, params = f"{label} row {i} {one}", one["params"]
        expected = plain_sampler.processed(logits[i].tolist(), params, one["stops"], one["prompt"], one["output"])
        if max(expected) == -math.inf:
            assert not math.isfinite(peaks[i]), where
            assert tokens[i] == 0, where
            continue
        assert peaks[i] == pytest.approx(max(expected), rel=1e-5, abs=1e-4), where
        if params.greedy:
            assert expected[tokens[i]] >= max(expected) - 1e-4, where
        elif not params.has_penalties:  # with them float32 may rank otherwise what they made nearly equal
            kept = plain_sampler.kept(torch.tensor(expected, dtype=torch.float64).float().tolist(), params)
            number = plain_sampler.splitmix_uniform(one["seed"], len(one["output"]))
            assert drawn_for(number, kept, tokens[i]), where


@pytest.mark.parametrize("vocab", [7, 64, 1000, 3001])
def test_masks_are_as_if_the_logits_had_been_changed(pool, vocab):
    rng, label = fresh_rng()
    bits = np.random.default_rng(rng.getrandbits(32))
    table, count = Table(vocab), 40
    for _ in range(count):
        table.add(**random_facts(rng, vocab))
    logits = torch.stack([random_logits(rng, vocab) for _ in range(count)])
    logits[rng.randrange(count), rng.randrange(vocab)] = math.nan  # counts only where it is possible
    masked = rng.sample(range(count), 30)
    words = bits.integers(-(2**31), 2**31, (30, num_words(vocab)), dtype=np.int32)
    words[:20] &= -(bits.random((20, num_words(vocab))) < 0.1).astype(np.int32)  # of most words nothing is possible
    allowed = Allowed(masked, words)
    tokens, peaks = table.sample(pool, logits, allowed=allowed)
    changed = logits.clone()
    forbid(changed, allowed)
    expected, others = table.sample(pool, changed)
    assert tokens == expected, label
    assert np.array_equal(np.isfinite(peaks), np.isfinite(others)), label
    possible = [t for t in range(vocab) if int(words[0, t // 32]) >> (t % 32) & 1]
    assert tokens[masked[0]] in possible or not math.isfinite(peaks[masked[0]]), label


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.2, min_p=0.2, top_k=6, top_p=0.9),
        SamplingParams(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.3, logit_bias={2: 1.0}),
    ],
    ids=["all", "top_k", "top_p", "every filter", "penalties"],
)
@pytest.mark.parametrize("crowd", [0, 4000], ids=["few", "many"])
def test_draws_follow_the_distribution(pool, params, crowd):
    """Chi-square of at most 15 degrees of freedom on fresh logits: above 60 with a probability below 1e-6.

    A crowd of tokens that share the least of the probability makes the kernel take its other way.
    """
    rng, label = fresh_rng()
    count, output = 3000, [1, 2, 2]
    values = [rng.gauss(0, 1) for _ in range(16)]
    logits = torch.tensor(values + [min(values) - 2 - math.log(max(crowd, 1))] * crowd)
    table = Table(len(logits))
    for _ in range(count):
        table.add(params, seed=rng.randrange(2**64), prompt=[0], output=output)
    tokens, _ = table.sample(pool, logits.repeat(count, 1))
    expected = [0.0] * 17
    for token, part in plain_sampler.kept(plain_sampler.processed(logits.tolist(), params, [], [0], output), params):
        expected[min(token, 16)] += part * count
    observed = np.bincount(np.minimum(tokens, 16), minlength=17)
    assert chi_square(observed.tolist(), expected) < 60, label


def test_a_row_depends_on_nothing_else(pool):
    rng, label = fresh_rng()
    table = Table(3000)
    for _ in range(40):
        table.add(**random_facts(rng, 3000))
    logits = torch.stack([random_logits(rng, 3000) for _ in range(40)])
    alone = [table.sample(pool, logits[i : i + 1].clone(), [i])[0][0] for i in range(40)]
    for threads, size in ((1, 40), (3, 17), (2, 40)):
        order = rng.sample(range(40), size)
        tokens, _ = table.sample(Pool(threads, pool_isa(pool)), logits[order], order)
        assert tokens == [alone[i] for i in order], label


def pool_isa(pool: Pool) -> str:
    return next(name for name in NAMES if f"octavo-{name}-" in pool.kernels._name)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=5), SamplingParams(top_p=0.5)])
def test_logits_that_are_no_numbers_give_no_token(pool, params):
    vocab = 3001
    logits = torch.randn(5, vocab)
    logits[0, 2999] = logits[1, vocab - 1] = math.nan
    logits[2, 7] = math.inf
    logits[3] = -math.inf
    table = Table(vocab)
    for _ in range(5):
        table.add(params, seed=3)
    tokens, peaks = table.sample(pool, logits)
    assert [math.isfinite(peak) for peak in peaks] == [False, False, False, False, True]
    assert tokens[:4] == [0, 0, 0, 0]


def test_greedy_takes_the_lowest_of_equals(pool):
    table = Table(3000)
    table.add(SamplingParams(temperature=0), seed=0)
    logits = torch.zeros(1, 3000)
    logits[0, [77, 78, 2999]] = 5.0
    assert table.sample(pool, logits)[0] == [77]
