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
from octavo.features.speculation.eagle.head import DraftVocabulary, EagleHead

_TOKEN_WEIGHT = 0.1
"""Weight of the tokens' loss beside that of the states, as published."""
_NOISE = 0.1
"""Width of the noise added to input states, relative to their size: the head learns to tolerate its own errors."""
_LIKELY = 4
"""Tokens of each position that are candidates in the tokens' loss."""
_OTHERS = 1024
"""Further candidates of a batch, drawn at random: a loss over the whole vocabulary would take most of the time."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: times that each example is seen.
        batch: examples of a step.
        rate: highest learning rate; it rises over the first tenth of the steps, and falls to zero.
    """

    epochs: int = 6
    batch: int = 8
    rate: float = 1e-3
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
) -> None:
    """Train a head in place.

    Args:
        progress: called after each step with its number, the number of steps and the loss.
    """
    rng, noise = random.Random(recipe.seed), torch.Generator(head.fc.weight.device).manual_seed(recipe.seed)
    steps = recipe.epochs * math.ceil(len(examples) / recipe.batch)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    head.train()
    for step, chosen in enumerate(_batches(examples, recipe, rng), 1):
        loss = _loss(head, target, chosen, noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        progress(step, steps, loss.item())
    head.eval()


def _batches(examples: Sequence[Example], recipe: Recipe, rng: random.Random) -> Iterator[list[Example]]:
    order = list(examples)
    for _ in range(recipe.epochs):
        rng.shuffle(order)
        for start in range(0, len(order), recipe.batch):
            yield order[start : start + recipe.batch]


def _loss(head: EagleHead, target: Target, examples: Sequence[Example], noise: torch.Generator) -> Tensor:
    """Return the smooth L1 distance of the predicted states, plus the cross-entropy of the model's distributions."""
    device = head.fc.weight.device
    tokens = pad_sequence([one.tokens for one in examples], batch_first=True).to(device)
    states = pad_sequence([one.states for one in examples], batch_first=True).to(device)
    counts = torch.tensor([len(one.tokens) for one in examples], device=device)
    begins = torch.tensor([one.num_prompt for one in examples], device=device)
    places = torch.arange(tokens.shape[1] - 1, device=device)
    of_answer = (places >= begins[:, None] - 1) & (places < counts[:, None] - 1)
    spread = (torch.rand(states.shape, generator=noise, device=device) - 0.5) * _NOISE * states.std()
    predicted = head(functional.embedding(tokens[:, 1:], target.embeddings), (states + spread)[:, :-1])
    predicted, wanted = predicted[of_answer], states[:, 1:][of_answer]
    distance = functional.smooth_l1_loss(predicted, wanted)
    with torch.no_grad():
        likely = (wanted @ target.output.T).topk(_LIKELY).indices
        others = torch.randint(len(target.output), (_OTHERS,), generator=noise, device=device)
        rows = target.output[torch.cat([likely.flatten(), others]).unique()]
        probabilities = (wanted @ rows.T).softmax(-1)
    return distance + _TOKEN_WEIGHT * functional.cross_entropy(predicted @ rows.T, probabilities)


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
    for one in examples:
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
