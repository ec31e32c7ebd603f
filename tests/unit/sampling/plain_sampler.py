"""The sampler written out plainly: one row, float64, a full sort, Python numbers. What the fast one must agree with."""

from __future__ import annotations

import math
from collections import Counter

from octavo.core.params import SamplingParams


def processed(logits: list[float], params: SamplingParams, stops: list[int], prompt: list[int], output: list[int]):
    logits = list(logits)
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        logits = [x if token in allowed else -math.inf for token, x in enumerate(logits)]
    for *beginning, last in params.bad_token_ids or []:
        if not beginning or output[-len(beginning) :] == beginning:
            logits[last] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += max(-100.0, min(100.0, bias))
    if len(output) < params.min_tokens:
        for token in stops:
            logits[token] = -math.inf
    for token in (set(prompt) | set(output)) - {-1}:  # which stands for an embedding
        rp = params.repetition_penalty
        logits[token] = logits[token] / rp if logits[token] > 0 else logits[token] * rp
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def kept(logits: list[float], params: SamplingParams) -> list[tuple[int, float]]:
    """(token, probability) of what the filters leave, in order of rank; of ids when no filter is in force."""
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    left = [i for i in ranked if weights[i] >= params.min_p]
    if params.top_k > 0:
        left = left[: params.top_k]
    total = math.fsum(weights[i] for i in left)
    chosen, mass = [], 0.0
    for i in left:
        if params.top_p < 1 and chosen and mass >= params.top_p * total:
            break
        chosen.append(i)
        mass += weights[i]
    if params.top_p == 1 and not 0 < params.top_k < len(logits) and params.min_p == 0:
        chosen.sort()
    total = math.fsum(weights[i] for i in chosen)
    return [(i, weights[i] / total) for i in chosen]


def interval(logits: list[float], params: SamplingParams, token: int) -> tuple[float, float]:
    """The part of [0, 1) for which the token is drawn; empty if it isn't among those kept."""
    mass = 0.0
    for i, probability in kept(logits, params):
        if i == token:
            return mass, mass + probability
        mass += probability
    return 1.0, 0.0


def splitmix_uniform(seed: int, position: int) -> float:
    """The same hash in Python's unbounded integers."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    key = mix((seed + gamma) & mask)
    return (mix((key + (position + 1) * gamma) & mask) >> 11) / 2**53
