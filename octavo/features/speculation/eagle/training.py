"""Training an EAGLE head, and what it is worth: how many of its drafts the model accepts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from octavo.features.speculation.eagle.corpus import Example, Target
from octavo.features.speculation.eagle.head import DraftVocabulary, EagleHead, Passes

_NOISE = 0.1
"""Width of the noise added to input states, relative to their size: the head learns to tolerate its own errors."""
_LIKELY = 4
"""Tokens of each position that are candidates in the tokens' loss, if the head draws all tokens."""
_OTHERS = 1024
"""Further candidates of a batch, drawn at random: a loss over the whole vocabulary would take most of the time."""
_LATER = 0.7
"""Weight of the loss of each further pass, relative to the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: times that each example is seen.
        batch: examples of a step.
        rate: highest learning rate; it rises over the first tenth of the steps, and falls to zero.
        passes: drafts in a row that the head is trained for, each from its own prediction before.
    """

    epochs: int = 6
    batch: int = 8
    rate: float = 1e-3
    passes: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Drafts of a head that are the model's own greedy tokens.

    Attributes:
        first: share of positions whose first draft is.
        length: mean number of drafts in a row that are, of `chain`.
        chain: drafts after each position.
    """

    first: float
    length: float
    chain: int


def train(
    head: EagleHead,
    target: Target,
    examples: Sequence[Example],
    recipe: Recipe,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    *,
    drawn: DraftVocabulary | None = None,
) -> None:
    """Train a head in place.

    Args:
        drawn: the tokens that the head draws, whose rows are trained, too; None for all tokens.
        progress: called after each step with its number, the number of steps and the loss.
    """
    rng, noise = random.Random(recipe.seed), torch.Generator(head.fc.weight.device).manual_seed(recipe.seed)
    steps = recipe.epochs * math.ceil(len(examples) / recipe.batch)
    parameters = list(head.parameters()) if drawn is None else [*head.parameters(), drawn.output.requires_grad_()]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    head.train()
    for step, chosen in enumerate(_batches(examples, recipe, rng), 1):
        loss = _loss(head, target, chosen, noise, drawn, recipe.passes)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        schedule.step()
        progress(step, steps, loss.item())
    head.eval()
    if drawn is not None:
        drawn.output.requires_grad_(False)


def _batches(examples: Sequence[Example], recipe: Recipe, rng: random.Random) -> Iterator[list[Example]]:
    order = list(examples)
    for _ in range(recipe.epochs):
        rng.shuffle(order)
        for start in range(0, len(order), recipe.batch):
            yield order[start : start + recipe.batch]


def _loss(
    head: EagleHead,
    target: Target,
    examples: Sequence[Example],
    noise: torch.Generator,
    drawn: DraftVocabulary | None,
    passes: int,
) -> Tensor:
    """Return the smooth L1 distance of the predicted states, plus the cross-entropy of the model's distributions.

    Later passes begin with the states that the one before predicted, as later drafts do (HASS, Zhang et al. 2024,
    https://arxiv.org/abs/2408.15766).
    """
    device = head.fc.weight.device
    tokens = pad_sequence([one.tokens for one in examples], batch_first=True).to(device)
    states = pad_sequence([one.states for one in examples], batch_first=True).to(device).float()
    counts = torch.tensor([len(one.tokens) for one in examples], device=device)
    begins = torch.tensor([one.num_prompt for one in examples], device=device)
    places = torch.arange(tokens.shape[1] - 1, device=device)
    embedded = functional.embedding(tokens[:, 1:], target.embeddings)
    spread = (torch.rand(states.shape, generator=noise, device=device) - 0.5) * _NOISE * states.std()
    given, known = (states + spread)[:, :-1], states[:, 1:]
    of_answer = (places >= begins[:, None] - 1) & (places < counts[:, None] - 1)
    rows, likely = _candidates(known[of_answer], target, noise, drawn)
    before: Passes = []
    loss = states.new_zeros(())
    for number in range(passes):
        predicted = head(embedded, given, before)
        taken = of_answer & (places >= begins[:, None] - 1 + number)  # the others have no prediction before them
        if not taken.any():  # a mean over nothing would not be a number
            break
        mine, wanted = predicted[taken], known[taken]
        distance = functional.smooth_l1_loss(mine, wanted)
        entropy = functional.cross_entropy(mine @ rows.T, likely[taken[of_answer]])
        loss = loss + _LATER**number * (distance + entropy)
        given = torch.cat([given[:, :1], predicted[:, :-1]], dim=1)
    return loss


@torch.no_grad()
def _candidates(
    states: Tensor, target: Target, noise: torch.Generator, drawn: DraftVocabulary | None
) -> tuple[Tensor, Tensor]:
    """Return the rows of the output head over which a loss is computed [n, hidden_size], and the model's probabilities
    of their tokens after the states [m, hidden_size]: [m, n], which sum up to 1."""
    if drawn is not None:
        return drawn.output, (states @ target.output[drawn.tokens].T).softmax(-1)
    likely = (states @ target.output.T).topk(_LIKELY).indices
    others = torch.randint(len(target.output), (_OTHERS,), generator=noise, device=states.device)
    rows = target.output[torch.cat([likely.flatten(), others]).unique()]
    return rows, (states @ rows.T).softmax(-1)


def frequent_tokens(examples: Sequence[Example], count: int, target: Target) -> DraftVocabulary:
    """Return the tokens that answers have most often; where they have fewer, those with the lowest numbers, too."""
    size = len(target.output)
    seen = torch.zeros(size, dtype=torch.int64)
    for one in examples:
        seen += torch.bincount(one.tokens[one.num_prompt :].cpu(), minlength=size)
    tokens = seen.argsort(descending=True, stable=True)[:count].sort().values.to(target.output.device)
    return DraftVocabulary(tokens, target.output[tokens])


@torch.inference_mode()
def acceptance(
    head: EagleHead,
    target: Target,
    examples: Sequence[Example],
    *,
    drawn: DraftVocabulary | None = None,
    chain: int = 3,
    positions: int = 8,
) -> HeadAcceptance:
    """Return how many drafts of the head the model accepts in its greedy answers.

    Args:
        drawn: the tokens that the head draws; None for all.
        chain: drafts after each position.
        positions: places of each answer at which chains begin, evenly spaced; shorter answers have none.
    """
    firsts, lengths = 0, []
    total = 0
    draw = partial(_drafts, drawn or DraftVocabulary(torch.arange(len(target.output)), target.output))
    for example in examples:
        one = example.on(head.fc.weight.device)
        expected = (one.states @ target.output.T).argmax(-1)  # the model's token after each position
        embedded = functional.embedding(one.tokens[1:], target.embeddings)
        drafts = draw(head(embedded[None], one.states[None, :-1])[0])
        right = drafts[one.num_prompt - 1 :] == expected[one.num_prompt :]
        firsts, total = firsts + int(right.sum()), total + len(right)
        last = len(one.tokens) - 1 - chain
        if last >= one.num_prompt:
            ends = torch.linspace(one.num_prompt, last, positions).long().unique().tolist()
            lengths += [_accepted(head, draw, one, embedded, expected, end, chain) for end in ends]
    return HeadAcceptance(firsts / max(1, total), sum(lengths) / max(1, len(lengths)), chain)


def _drafts(drawn: DraftVocabulary, states: Tensor) -> Tensor:
    """Return the likeliest tokens of predicted states [n, hidden_size]."""
    return drawn.tokens.to(states.device)[(states @ drawn.output.T).argmax(-1)]


def _accepted(
    head: EagleHead,
    draw: Callable[[Tensor], Tensor],
    one: Example,
    embedded: Tensor,
    expected: Tensor,
    end: int,
    chain: int,
) -> int:
    """Return how many of `chain` drafts after the first `end` + 1 tokens are the model's, in a row."""
    states = one.states[:end]
    for place in range(end, end + chain):
        predicted = head(embedded[None, :place], states[None])[0, -1:]
        if int(draw(predicted)) != int(expected[place]):
            return place - end
        states = torch.cat([states, predicted])
    return chain
