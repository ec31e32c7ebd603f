"""Steps travel: what executors are given and give back is the same after it was bytes."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_kit import World, random_requests, worlds

from octavo.core.output import StepOutput, TokenLogprobs
from octavo.core.params import SamplingParams, StructuredOutputsParams
from octavo.core.plan import NewRow, StepPlan
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.toy import ToyDevice, ToyStep
from octavo.features import payload_types

CODEC = PlanCodec(payload_types())


def sent(output: StepOutput) -> StepOutput:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput)


class Travelling(ToyDevice):
    """Is given what was bytes in between."""

    def forward(self, plan: StepPlan) -> ToyStep:
        found = CODEC.decode_plan(CODEC.encode_plan(plan))
        assert found == plan
        return super().forward(found)

    def sample(self, step: ToyStep, payload: dict[str, Any]) -> None:
        super().sample(step, CODEC.decode_payload(CODEC.encode_payload(payload)))

    def _sample(self, step: ToyStep) -> None:
        super()._sample(step)
        assert step.output is not None
        found = sent(step.output)
        assert found == step.output
        step.output = found


@given(world=worlds(), count=st.integers(1, 10), abort_rate=st.sampled_from([0.0, 0.05]))
def test_an_engine_lives_on_plans_that_travelled(world: World, count: int, abort_rate: float) -> None:
    world.device.__class__ = Travelling
    world.run(random_requests(world.rng, count), abort_rate)
    world.check()


def made(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a payload's type. Hypothesis knows no msgspec structs and no memory views."""
    if kind is SamplingParams:
        return PARAMS
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{field.name: made(field.type) for field in msgspec.structs.fields(kind)})
    if kind is memoryview:
        return st.binary(max_size=40).map(memoryview)
    arguments = getattr(kind, "__args__", ())
    origin = getattr(kind, "__origin__", None)
    if origin is list:
        return st.lists(made(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(made(arguments[0]), made(arguments[1]), max_size=3)
    if arguments and type(None) in arguments:
        return st.none() | made(next(one for one in arguments if one is not type(None)))
    if kind is int:
        return st.integers(0, 2**31)
    return st.from_type(kind)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(1, 9),
    max_tokens=st.integers(1, 99),
    logit_bias=st.none() | st.just({3: 1.5}),
    stop_token_ids=st.none() | st.lists(st.integers(0, 9), max_size=3),
    bad_token_ids=st.none() | st.just([[2], [0, 3]]),
    extra_args=st.none() | st.just({"a": [1, {"b": None}], "c": "d"}),
    structured_outputs=st.none() | st.just(StructuredOutputsParams(regex="a+")),
    logprobs=st.none() | st.integers(0, 3),
)
IDS = st.lists(st.integers(0, 2**31), max_size=5)
ROWS = st.builds(
    NewRow,
    slot=st.integers(0, 999),
    tokens=IDS,
    num_prompt=st.integers(1, 9),
    params=PARAMS,
    seed=st.integers(0, 2**63),
    stop_ids=IDS,
    num_computed=st.integers(0, 9),
    blocks=st.lists(IDS, max_size=2),
    options=st.dictionaries(st.text(max_size=5), st.just(msgspec.Raw(msgspec.msgpack.encode({"x": [1]}))), max_size=2),
    raw_logprobs=st.booleans(),
)


@given(data=st.data(), rows=st.lists(ROWS, max_size=3))
def test_every_payload_that_a_feature_declares_comes_back_equal(data: st.DataObject, rows: list[NewRow]) -> None:
    payload = {name: data.draw(made(kind), name) for name, kind in payload_types().items()}
    plan = StepPlan(7, rows, [1], [1], [0], [True], [(1, 0, 2, 3)], [(4, 5)], payload, True, True)
    found = CODEC.decode_plan(CODEC.encode_plan(plan))
    assert found == plan
    assert [type(value) for value in found.payload.values()] == [type(value) for value in payload.values()]
    assert CODEC.decode_payload(CODEC.encode_payload(payload)) == payload


def test_outputs_come_back_equal() -> None:
    entry = TokenLogprobs(-0.5, 1, [3, 4], [-0.5, float("-inf")])
    output = StepOutput([[1], []], {0: [entry]}, {1: "why"}, {1: [entry]}, {0: {"pooling": b"\x00"}}, 0.25)
    assert sent(output) == output


def test_what_no_feature_declared_does_not_travel() -> None:
    plan = StepPlan(0, [], [], [], [], [], [], [], {"odd": object()})
    with pytest.raises(TypeError, match="'odd' declares no type for its payload"):
        CODEC.encode_plan(plan)
    with pytest.raises(TypeError, match="'odd'"):
        CODEC.encode_payload({"odd": random})
