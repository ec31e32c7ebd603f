"""Drafts that are verified leave the target's distribution as it is, whoever proposed them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from chi_square import chi_square
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.sampling.verify import verify, verify_branches

VOCAB, TRIALS, LENGTH = 5, 100_000, 3

Verify = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def test_the_longest_prefix_that_agrees_and_one_more() -> None:
    """Checked against a plain loop; rows of several lengths, with padding, and tokens that could not be drawn."""
    rng = random.Random(3)
    for _ in range(200):
        sizes = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        width = max([*sizes, 1])
        drawn = [[rng.randrange(-1, 2) for _ in range(size + 1)] for size in sizes]
        drafts = [[rng.randrange(2) for _ in range(width)] for _ in sizes]
        counts = [rng.randint(0, size) for size in sizes]
        expected = []
        for mine, proposed, count in zip(drawn, drafts, counts, strict=True):
            kept = 1
            while kept <= count and mine[kept - 1] == proposed[kept - 1]:
                kept += 1
            expected.append(kept)
        starts = [sum(size + 1 for size in sizes[:row]) for row in range(len(sizes))]
        flat = torch.tensor([token for mine in drawn for token in mine])
        assert verify(flat, torch.tensor(drafts), torch.tensor(counts), torch.tensor(starts)).tolist() == expected


TREE = DraftTree.of([(0,), (0, 0), (1,), (0, 1), (1, 0), (2,)])
SHAPE = (torch.tensor(TREE.parents), torch.from_numpy(TREE.depths), torch.from_numpy(TREE.precedes).float())


def test_the_path_that_agrees_and_one_more() -> None:
    """Trees and chains of several lengths, against a walk from the root."""
    rng = random.Random(3)
    for _ in range(300):
        sizes = [rng.choice([0, 1, 2, len(TREE)]) for _ in range(rng.randrange(1, 6))]
        width = max([*sizes, 1])
        drawn = [[rng.randrange(-1, 4) for _ in range(size + 1)] for size in sizes]
        drafts = [_distinct(rng)[:width] for _ in sizes]
        expected = []
        for mine, proposed, count in zip(drawn, drafts, sizes, strict=True):
            path, at = [0], -1
            while True:
                after = [i for i in range(count) if TREE.parents[i] == at and proposed[i] == mine[1 + at]]
                if not after:
                    break
                at = after[0]
                path.append(1 + at)
            expected.append(path)
        starts = [sum(size + 1 for size in sizes[:row]) for row in range(len(sizes))]
        flat = torch.tensor([token for mine in drawn for token in mine])
        kept, paths = verify_branches(flat, torch.tensor(drafts), torch.tensor(sizes), torch.tensor(starts), *SHAPE)
        assert [path[:count] for path, count in zip(paths.tolist(), kept.tolist(), strict=True)] == expected


def _distinct(rng: random.Random) -> list[int]:
    """Return random drafts; those after the same token differ."""
    tokens: list[int] = []
    for i, parent in enumerate(TREE.parents):
        taken = [tokens[j] for j in range(i) if TREE.parents[j] == parent]
        tokens.append(rng.choice([token for token in range(4) if token not in taken]))
    return tokens


def test_of_equal_drafts_one_is_kept() -> None:
    """What follows either of them follows the same tokens."""
    drafts, drawn = torch.tensor([[7, 8, 7, 5, 9, 7]]), torch.tensor([7, 9, 1, 9, 2, 3, 9])
    kept, paths = verify_branches(drawn, drafts, torch.tensor([6]), torch.tensor([0]), *SHAPE)
    assert kept.tolist() == [3]
    assert drawn[paths[0, :3]].tolist() == [7, 9, 3]


@pytest.mark.parametrize("fault", [False, True], ids=["", "a path that was not drawn"])
def test_outputs_of_trees_follow_the_target(fault: bool) -> None:
    """Two tokens, by the tree of a drafter that knows the target a little, against the target's distribution."""
    torch.manual_seed(0)
    chain = torch.rand(VOCAB, VOCAB).pow(3)
    chain /= chain.sum(1, keepdim=True)
    likely = chain.argsort(1, descending=True)
    drafts = torch.zeros(TRIALS, len(TREE), dtype=torch.long)
    for i, parent in enumerate(TREE.parents):
        before = torch.zeros(TRIALS, dtype=torch.long) if parent < 0 else drafts[:, parent]
        drafts[:, i] = likely[before, sum(other == parent for other in TREE.parents[:i])]
    befores = torch.cat([torch.zeros(TRIALS, 1, dtype=torch.long), drafts], 1)
    drawn = torch.multinomial(chain[befores.view(-1)], 1).view(TRIALS, -1)
    counts, starts = torch.full((TRIALS,), len(TREE)), (1 + len(TREE)) * torch.arange(TRIALS)
    kept, paths = verify_branches(drawn.view(-1), drafts, counts, starts, *SHAPE)
    first = drawn[:, 0]
    second = drawn.gather(1, paths[:, 1:2]).squeeze(1)
    late = kept < 2
    second[late] = drawn[late, 1] if fault else torch.multinomial(chain[first[late]], 1).squeeze(1)
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB**2)
    chances = chain[0][:, None] * chain
    found = chi_square(observed.tolist(), (chances.double().view(-1) * TRIALS).tolist())
    freedom = VOCAB**2 - 1
    assert (found > freedom + 6 * math.sqrt(2 * freedom)) == fault


def misfit(check: Verify, *, redraws: bool = False, seed: int = 0) -> float:
    """The statistic of outputs of LENGTH tokens, each by two drafts and what follows them, against the target's.

    The target is a Markov chain; the drafter proposes what it likes, and knows the chain a little.

    Args:
        redraws: draw the token of a rejected draft anew, in place of what was drawn when it was rejected.
    """
    torch.manual_seed(seed)
    chain = torch.rand(VOCAB, VOCAB).pow(3)
    chain /= chain.sum(1, keepdim=True)

    def draw(before: Tensor) -> Tensor:
        return torch.multinomial(chain[before], 1).squeeze(1)

    begin = torch.zeros(TRIALS, dtype=torch.long)
    first = torch.where(torch.rand(TRIALS) < 0.6, chain[0].argmax(), torch.randint(VOCAB, (TRIALS,)))
    drafts = torch.stack([first, torch.where(torch.rand(TRIALS) < 0.6, draw(first), 1)], 1)
    counts = torch.randint(0, 3, (TRIALS,))
    drawn = torch.stack([draw(begin), draw(drafts[:, 0]), draw(drafts[:, 1])], 1)
    kept = check(drawn.view(-1), drafts, counts, 3 * torch.arange(TRIALS))
    output, last = drawn.clone(), kept - 1
    if redraws:
        before = torch.where(last == 0, 0, drafts.gather(1, (last - 1).clamp(min=0)[:, None]).squeeze(1))
        rejected = kept <= counts
        output[rejected, last[rejected]] = draw(before)[rejected]
    for place in range(1, LENGTH):
        late = kept <= place
        output[late, place] = draw(output[late, place - 1])
    flat = (output * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    observed = torch.bincount(flat, minlength=VOCAB**LENGTH)
    chances = chain[0][:, None, None] * chain[:, :, None] * chain[None]
    return chi_square(observed.tolist(), (chances.double().view(-1) * TRIALS).tolist())


_FREEDOM = VOCAB**LENGTH - 1


@pytest.mark.parametrize("seed", range(3))
def test_outputs_follow_the_target(seed: int) -> None:
    assert misfit(verify, seed=seed) < _FREEDOM + 5 * math.sqrt(2 * _FREEDOM)


def accept_all(drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    return 1 + counts


def wrong_place(drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    """Compare each draft with the token drawn one position later."""
    return verify(drawn.roll(-1), drafts, counts, starts)


def test_faults_are_noticed() -> None:
    """Accepting whatever is proposed; comparing at another position; and no residual distribution: drawing anew after a
    rejection."""
    assert misfit(accept_all) > 10 * _FREEDOM
    assert misfit(wrong_place) > 5 * _FREEDOM
    assert misfit(verify, redraws=True) > 10 * _FREEDOM


@pytest.mark.parametrize("shared", [True, False])
def test_drafts_sampled_from_a_distribution_leave_the_target_s(shared: bool) -> None:
    """One draft, sampled from another distribution, with the target's random numbers or with its own.

    With the target's, it is accepted as often as Daliri, Musco and Suresh prove; independent ones agree by chance only.
    """
    torch.manual_seed(7)
    target, other = (torch.rand(VOCAB).pow(2) + 0.02 for _ in range(2))
    target, other = target / target.sum(), other / other.sum()
    noise, own = (-torch.rand(TRIALS, VOCAB).log().neg().log() for _ in range(2))
    drawn = (target.log() + noise).argmax(1)
    drafts = (other.log() + (noise if shared else own)).argmax(1)[:, None]
    flat = torch.stack([drawn, drawn], 1).view(-1)
    kept = verify(flat, drafts, torch.ones(TRIALS, dtype=torch.long), 2 * torch.arange(TRIALS))
    accepted = kept > 1
    output = torch.where(accepted, drafts[:, 0], drawn)
    expected = (target.double() * TRIALS).tolist()
    statistic = chi_square(torch.bincount(output, minlength=VOCAB).tolist(), expected)
    assert statistic < VOCAB - 1 + 5 * math.sqrt(2 * (VOCAB - 1))
    distance = float((target - other).abs().sum() / 2)
    if shared:
        assert float(accepted.float().mean()) > (1 - distance) / (1 + distance) - 0.01
    else:
        assert float(accepted.float().mean()) == pytest.approx(float((target * other).sum()), abs=0.01)
    assert chi_square(torch.bincount(drafts[:, 0], minlength=VOCAB).tolist(), expected) > 10 * VOCAB
