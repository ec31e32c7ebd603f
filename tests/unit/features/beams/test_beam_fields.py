"""Beam search over HTTP: what reaches the engine, and what can't be combined with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from server_kit import HELLO, ask_now, make_house, saying

from octavo.features.beams.engine import Beams

PATHS = {"/v1/chat/completions": HELLO, "/v1/completions": {"prompt": "Hello"}}


@pytest.mark.parametrize("path", PATHS)
def test_as_many_beams_as_answers(path: str) -> None:
    house = make_house(saying("one", "two"), features=["beams"])
    answer = ask_now(house.app, path, PATHS[path] | {"use_beam_search": True, "n": 2, "length_penalty": 0.5})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    request = house.engine.requests[0]
    assert msgspec.msgpack.decode(request.options["beams"], type=Beams) == Beams(2, 0.5)
    assert (request.params.beam_width, request.params.n) == (None, 2)


@pytest.mark.features("grammar")
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
        ({"use_beam_search": True, "length_penalty": 1e308}, "length_penalty"),
        ({"use_beam_search": True, "length_penalty": -33}, "length_penalty"),
    ],
)
def test_what_does_not_go_together_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    answer = ask_now(make_house(saying("x"), features=["beams", "grammar"]).app, path, PATHS[path] | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


@pytest.mark.parametrize("path", PATHS)
def test_a_length_penalty_of_one_asks_for_nothing(path: str) -> None:
    assert ask_now(make_house(saying("x")).app, path, PATHS[path] | {"length_penalty": 1.0}).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_the_lowest_penalty_is_fine(path: str) -> None:
    house = make_house(saying("x"), features=["beams"])
    assert ask_now(house.app, path, PATHS[path] | {"use_beam_search": True, "length_penalty": -32}).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_without_the_feature_refuses_a_search(path: str) -> None:
    answer = ask_now(make_house(saying("x"), features=[]).app, path, PATHS[path] | {"use_beam_search": True})
    assert answer.status == 400
    assert "no beam search" in answer.error()["message"]
