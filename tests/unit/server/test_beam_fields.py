"""Beam search over HTTP: what reaches the engine, and what can't be combined with it."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, ask_now, make_house, saying

PATHS = {"/v1/chat/completions": HELLO, "/v1/completions": {"prompt": "Hello"}}


@pytest.mark.parametrize("path", PATHS)
def test_as_many_beams_as_answers(path: str) -> None:
    house = make_house(saying("one", "two"))
    answer = ask_now(house.app, path, PATHS[path] | {"use_beam_search": True, "n": 2, "length_penalty": 0.5})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    params = house.engine.requests[0].params
    assert (params.beam_width, params.n, params.length_penalty) == (2, 2, 0.5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "frequency_penalty": 1}, "frequency_penalty"),
        ({"use_beam_search": True, "repetition_penalty": 2}, "repetition_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "guided_regex": "a"}, "structured_outputs"),
        ({"use_beam_search": True, "n": 65}, "n"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_does_not_go_together_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    answer = ask_now(make_house(saying("x"), features=["grammar"]).app, path, PATHS[path] | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


@pytest.mark.parametrize("path", PATHS)
def test_a_length_penalty_of_one_asks_for_nothing(path: str) -> None:
    assert ask_now(make_house(saying("x")).app, path, PATHS[path] | {"length_penalty": 1.0}).status == 200
