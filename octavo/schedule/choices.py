"""The sequences of a request: one a choice, or one a beam."""

from __future__ import annotations

import random

from octavo.cache.cache import BlockTable
from octavo.core.request import GenerateRequest, Request


def make_choices(
    spec: GenerateRequest, max_tokens: int, eos: frozenset[int], seeds: random.Random, order: int
) -> list[Request]:
    """They follow the first, whose prompt they share. `order` is the first one's arrival number."""
    own_stops = frozenset(spec.params.stop_token_ids or ())
    choices: list[Request] = []
    for index in range(spec.params.beam_width or spec.params.n):
        request = Request(
            spec=spec,
            index=index,
            order=order + index,
            tokens=list(spec.tokens),
            max_tokens=max_tokens,
            stop_ids=own_stops if spec.params.ignore_eos else own_stops | eos,
            seed=seeds.getrandbits(62) if spec.params.seed is None else spec.params.seed + index,
            table=BlockTable(),
            leader=choices[0] if choices else None,
        )
        choices.append(request)
    return choices
