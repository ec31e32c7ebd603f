"""Drafts drawn from a distribution of their own: what is kept follows the target, and faults of a verification are
noticed.

100,000 rows of two drafts, with a target p and a drafter q that depend on the token before. The G statistic
(Wilks 1938) is 2 sum(observed * log(observed / expected)).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo.sampling.rng import uniform
from octavo.sampling.verify import verify

ROWS, VOCAB = 100_000, 6


def distributions(seed: int) -> Tensor:
    """Probabilities [V, V] of a token after each token."""
    made = torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    return made / made.sum(1, keepdim=True)


P = distributions(1)
Q = 0.6 * P + 0.4 * distributions(2)


def draw(chances: Tensor, before: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token [R] after `before` [R] by inversion, as the samplers do."""
    return torch.searchsorted(chances.cumsum(1)[before], numbers[:, None], right=True)[:, 0].clamp(max=VOCAB - 1)


def numbers(place: int, salt: int = 0) -> Tensor:
    return uniform(torch.arange(ROWS) + salt * 1_000_003, torch.full((ROWS,), place))


def kept_tokens(fault: str = "", *, coupled: bool = True) -> tuple[list[tuple[int, int]], float]:
    """Return each row's first two tokens, and the share of accepted drafts.

    The step has two drafts; a row that keeps one token only draws the second without drafts.
    """
    start = torch.zeros(ROWS, dtype=torch.long)
    salt = 0 if coupled else 7
    first = draw(Q, start, numbers(0, salt))
    drafts = torch.stack([first, draw(Q, first, numbers(1, salt))], 1)
    drawn = torch.stack(
        [draw(P, start, numbers(0)), draw(P, drafts[:, 0], numbers(1)), draw(P, drafts[:, 1], numbers(2))], 1
    )
    compared = drawn.roll(-1, 1) if fault == "wrong position" else drawn
    counts = torch.full((ROWS,), 2)
    kept = verify(compared.reshape(-1), drafts, counts, 3 * torch.arange(ROWS))
    if fault == "accept all":
        kept = 1 + counts
    tokens = drawn.clone()
    if fault == "accept all":
        tokens[:, :2] = drafts
    if fault == "no residual":
        again = torch.stack([draw(P, start, numbers(0, 3)), draw(P, tokens[:, 0], numbers(1, 3))], 1)
        rejected = kept[:, None] - 1 == torch.arange(2)
        tokens[:, :2] = torch.where(rejected, again, tokens[:, :2])
    second = torch.where(kept > 1, tokens[:, 1], draw(P, tokens[:, 0], numbers(1)))
    return list(zip(tokens[:, 0].tolist(), second.tolist(), strict=True)), float((kept - 1).sum()) / (2 * ROWS)


def misfit(pairs: list[tuple[int, int]]) -> float:
    """The G statistic in standard deviations above its mean."""
    expected = (P[0][:, None] * P).flatten() * ROWS
    first, second = (torch.tensor(part) for part in zip(*pairs, strict=True))
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB).double()
    terms = torch.where(observed > 0, observed * (observed / expected).log(), 0.0)
    freedom = VOCAB * VOCAB - 1
    return (2 * float(terms.sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("coupled", [True, False])
def test_what_is_kept_follows_the_target(coupled: bool) -> None:
    pairs, _ = kept_tokens(coupled=coupled)
    assert abs(misfit(pairs)) < 5


@pytest.mark.parametrize("fault", ["accept all", "no residual", "wrong position"])
def test_faults_are_noticed(fault: str) -> None:
    pairs, _ = kept_tokens(fault)
    assert misfit(pairs) > 50


def test_drafts_drawn_with_the_targets_numbers_are_accepted_more_often() -> None:
    """More are accepted than of drafts with random numbers of their own, which are equal only by chance."""
    assert kept_tokens()[1] > 1.3 * kept_tokens(coupled=False)[1]
