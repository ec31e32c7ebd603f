"""`SamplingParams` says which field is wrong, of whichever type it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.core.errors import InvalidRequestError
from octavo.core.params import RepetitionDetection
from octavo.core.structured import StructuredOutputsParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", "x"),
        ("n", "2"),
        ("temperature", None),
        ("max_tokens", [1]),
        ("stop", 5),
        ("logit_bias", [1]),
        ("bad_words", 5),
        ("allowed_token_ids", 7),
    ],
)
def test_a_value_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "x"),
        ("n", 1.5),
        ("top_k", 1.5),
        ("logprobs", True),
        ("stop", [5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"a": 1}),
        ("bad_words", "Paris"),
        ("bad_words", [1]),
        ("output_kind", "delta"),
        ("repetition_detection", 5),
        ("extra_args", [1]),
    ],
)
def test_a_request_takes_nothing_that_only_could_be_compared(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be an? |^{name} must be [A-Z]") as raised:
        SamplingParams(**{name: value}).clone()
    assert raised.value.param == name


def test_a_request_takes_what_a_program_computed() -> None:
    made = SamplingParams(
        temperature=np.float32(0.5),
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        min_tokens=2.0,  # type: ignore[arg-type]
        top_k=torch.tensor(4),  # type: ignore[arg-type]
        stop=("a", "b"),  # type: ignore[arg-type]
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        allowed_token_ids=[np.int64(7)],  # type: ignore[list-item]
        logit_bias={np.int64(8): np.float32(0.5)},  # type: ignore[dict-item]
        structured_outputs={"regex": "a"},  # type: ignore[arg-type]
        extra_args={"tensor": torch.ones(2)},
    ).clone(n=2)
    plain = (made.n, made.temperature, made.max_tokens, made.min_tokens, made.top_k, made.stop, made.stop_token_ids)
    assert plain == (2, 0.5, 3, 2, 4, ["a", "b"], [5, 6])
    assert [type(one) for one in plain] == [int, float, int, int, int, list, list]
    assert (made.allowed_token_ids, made.logit_bias) == ([7], {8: 0.5})
    assert made.structured_outputs == StructuredOutputsParams(regex="a")
    assert isinstance((made.extra_args or {})["tensor"], torch.Tensor)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": "5"}, "max_tokens must be an integer or None, got '5'."),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'."),
        ({"stop": 5}, "stop must be a list of strings, a string or None, got 5."),
        ({"logit_bias": {"a": "b"}}, "logit_bias must be a dict from integers to numbers or None, got {'a': 'b'}."),
        ({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'."),
    ],
)
def test_the_type_that_a_field_needs_is_said(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        SamplingParams(**fields).clone()
    assert raised.value.message == said


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: SamplingParams(temprature=1),
            "SamplingParams has no parameter 'temprature'; did you mean temperature?",
        ),  # type: ignore[call-arg]
        (lambda: StructuredOutputsParams(jsn={}), "did you mean json?"),  # type: ignore[call-arg]
        (lambda: RepetitionDetection(max_patern_size=2), "did you mean max_pattern_size?"),  # type: ignore[call-arg]
        (lambda: SamplingParams(5), "SamplingParams: Extra positional arguments provided; it takes n, "),  # type: ignore[misc]
    ],
)
def test_a_misspelled_parameter_names_the_right_one(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert said in str(raised.value)
