"""Masks of possible tokens, against bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.allowed import Allowed, forbid, in_common, num_words, words_of

VOCAB = 1003


def random_words(rows: int) -> np.ndarray:
    return np.random.default_rng().integers(-(2**31), 2**31, (rows, num_words(VOCAB)), dtype=np.int32)


def impossible(words: np.ndarray) -> torch.Tensor:
    return torch.tensor([[not int(row[token // 32]) >> (token % 32) & 1 for token in range(VOCAB)] for row in words])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_rows_that_are_named_are_masked(dtype: torch.dtype) -> None:
    words, logits = random_words(2), torch.randn(3, VOCAB).to(dtype)
    before, slow = logits.clone(), impossible(words)
    forbid(logits, Allowed([2, 0], words))
    assert torch.equal(logits[1], before[1])
    assert torch.equal(logits[2], before[2].masked_fill(slow[0], float("-inf")))
    assert torch.equal(logits[0], before[0].masked_fill(slow[1], float("-inf")))


def test_what_is_no_number_counts_only_where_it_is_possible() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = torch.nan
    forbid(logits, Allowed([0, 1], np.stack([words_of([5, 6], VOCAB), words_of([6], VOCAB)])))
    assert not logits[0].max().isfinite()
    assert logits[1].argmax() == 6


@pytest.mark.parametrize("more", [1, 5, 21, 22, 60])
def test_tokens_beyond_the_vocabulary_are_forbidden(more: int) -> None:
    """Masks are of the model's vocabulary, and may have any bits after it."""
    words, logits = random_words(1), torch.randn(1, VOCAB + more)
    forbid(logits, Allowed([0], words).within(VOCAB, VOCAB + more))
    assert torch.equal(logits[:, :VOCAB] == float("-inf"), impossible(words))
    assert (logits[:, VOCAB:] == float("-inf")).all()


def test_a_list_of_tokens_as_a_mask() -> None:
    tokens = [0, 31, 32, 999, VOCAB - 1]
    assert torch.nonzero(~impossible(words_of(tokens, VOCAB)[None])[0]).squeeze(-1).tolist() == tokens


def test_a_token_must_be_possible_for_everyone() -> None:
    one, other = random_words(2), random_words(2)
    assert in_common([]) is None
    both = in_common([Allowed([4, 1], one, {4: "a"}), Allowed([1, 0], other, {0: "b"})])
    assert both is not None
    assert (list(both.rows), both.errors) == ([4, 1, 0], {4: "a", 0: "b"})
    assert (both.words == np.stack([one[0], one[1] & other[0], other[1]])).all()
