"""Forbidden tokens, one rule at a time."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.params import SamplingParams
from octavo.sampling.bans import forbid
from octavo.sampling.sampler import RowSampler
from octavo.sampling.state import PreparedParams, SampleRow


def row(params: SamplingParams, output: list[int]) -> SampleRow:
    tokens = np.array([5, 6, *output], dtype=np.int32)
    return SampleRow(PreparedParams.make(params, 0, [], 10), tokens, 2)


def possible(params: SamplingParams, output: list[int]) -> set[int]:
    logits = torch.zeros(2, 10)
    forbid(logits, [row(SamplingParams(), []), row(params, output)])
    assert torch.isfinite(logits[0]).all()
    return set(torch.nonzero(torch.isfinite(logits[1])).squeeze(-1).tolist())


def test_only_allowed_tokens_are_possible() -> None:
    assert possible(SamplingParams(allowed_token_ids=[3, 8]), []) == {3, 8}


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert possible(SamplingParams(bad_token_ids=[[4]]), []) == set(range(10)) - {4}


def test_a_longer_bad_word_may_begin_but_not_end() -> None:
    params = SamplingParams(bad_token_ids=[[5, 6, 7]])
    assert 7 in possible(params, [])
    assert 7 in possible(params, [6])
    assert 7 in possible(params, [5, 1])
    assert 7 not in possible(params, [5, 6])
    assert 7 not in possible(params, [1, 5, 6])


def test_the_prompt_is_no_part_of_a_bad_word() -> None:
    assert 7 in possible(SamplingParams(bad_token_ids=[[6, 7]]), [])


def test_a_greedy_row_minds_them_too() -> None:
    logits = torch.arange(10.0)[None]
    for params, token in (
        (SamplingParams(temperature=0, allowed_token_ids=[2, 3]), 3),
        (SamplingParams(temperature=0, bad_token_ids=[[9]]), 8),
    ):
        assert RowSampler().sample(logits, [row(params, [])]).tokens.tolist() == [token]
