"""Lives of an engine whose requests get as many drafts as pay, by a clock that runs at random.

Drafts of a model take blocks as soon as they are proposed; those of lookup don't.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from world_kit import LAYOUTS, World, random_requests

from octavo.core.request import GenerateRequest
from octavo.features.speculation.config import DraftConfig
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.payload import NAME, SpeculationOption
from octavo.schedule.policy import POLICIES


@st.composite
def lives(draw: Any) -> tuple[World, SpeculationEngine]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    now = [0.0]

    def clock() -> float:
        now[0] += rng.choice([0.001, 0.002, 0.01])
        return now[0]

    who: dict[str, Any] = draw(st.sampled_from([{}, {"method": "draft_model", "model": "any"}]))
    config = DraftConfig(num_speculative_tokens=draw(st.integers(1, 7)), adaptive=draw(st.booleans()), **who)
    hook = SpeculationEngine(config, clock)
    world = World(
        rng=rng,
        depth=draw(st.integers(0, 2)),
        num_drafts=0,
        num_blocks=draw(st.sampled_from([9, 14, 20, 80])),
        budget=draw(st.sampled_from([6, 9, 16, 64])),
        policy=draw(st.sampled_from(sorted(POLICIES))),
        share=draw(st.booleans()),
        groups=draw(st.sampled_from(LAYOUTS)),
        extra=(hook,),
    )
    return world, hook


def optional(rng: random.Random, request: GenerateRequest) -> GenerateRequest:
    """The request as a front end sends it, or one that came another way."""
    if rng.random() < 0.2:
        return request
    option = SpeculationOption(enabled=rng.random() < 0.8, num_prompt=len(request.tokens))
    return msgspec.structs.replace(request, options={NAME: msgspec.Raw(msgspec.msgpack.encode(option))})


@given(lives(), st.integers(1, 12), st.sampled_from([0.0, 0.0, 0.05]))
@settings(max_examples=160, deadline=None)
def test_any_life_with_drafts(life: tuple[World, SpeculationEngine], count: int, abort_rate: float) -> None:
    world, hook = life
    world.run([optional(world.rng, one) for one in random_requests(world.rng, count)], abort_rate)
    world.check()
    assert not hook._drafted  # nothing is left of requests that have ended
