"""`logprob_token_ids` and `stream_interval` over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, VOCAB_SIZE, House, ask_now, ids, make_house, saying

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "abc"}
NAMED = ids("xyz")


@pytest.fixture
def house() -> House:
    return make_house(saying("hello there"))


def body_of(path: str) -> dict[str, Any]:
    return HELLO | {"logprobs": True} if path == CHAT else ASKED | {"logprobs": 1}


def test_a_chat_tells_the_named_tokens_and_the_token_itself(house: House) -> None:
    fields = {"logprob_token_ids": NAMED, "top_logprobs": 3, "return_tokens_as_token_ids": True}
    choice = ask_now(house.app, CHAT, body_of(CHAT) | fields).json()["choices"][0]
    written = [*ids("hello there"), 2]
    for entry, token in zip(choice["logprobs"]["content"], written, strict=True):
        assert entry["token"] == f"token_id:{token}"
        assert [top["token"] for top in entry["top_logprobs"]] == [f"token_id:{one}" for one in (token, *NAMED)]
    assert house.engine.requests[-1].params.logprob_token_ids == NAMED
    assert house.engine.requests[-1].params.logprobs is None


def test_a_completion_tells_them_and_the_token_itself(house: House) -> None:
    answer = ask_now(house.app, TEXT, body_of(TEXT) | {"logprob_token_ids": NAMED, "best_of": 2}).json()
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert tops[0] == {"h": -0.5, "x": -2.5, "y": -2.5, "z": -2.5}


def test_named_tokens_are_no_matter_of_max_logprobs() -> None:
    house = make_house(saying("hello"), max_logprobs=1)
    assert ask_now(house.app, CHAT, body_of(CHAT) | {"logprob_token_ids": NAMED}).status == 200


@pytest.mark.features("beams")
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprob_token_ids": []}, "must not be empty"),
        ({"logprob_token_ids": NAMED, "logprobs": None}, "when using `logprob_token_ids`"),
        ({"logprob_token_ids": [VOCAB_SIZE]}, "out-of-vocab"),
        ({"logprob_token_ids": list(range(129))}, "greater than max allowed: 128"),
        ({"logprob_token_ids": "12"}, "must be a list"),
        ({"logprob_token_ids": NAMED, "use_beam_search": True, "n": 2, "max_tokens": 4}, "beam search"),
        ({"stream_interval": 0}, "stream_interval must be at least 1"),
    ],
)
def test_what_is_refused(house: House, path: str, fields: dict[str, Any], words: str) -> None:
    answer = ask_now(house.app, path, body_of(path) | fields)
    assert answer.status == 400
    assert words in answer.error()["message"]


def pieces(house: House, path: str, interval: int | None) -> list[str]:
    body = (HELLO if path == CHAT else ASKED) | {"stream": True, "stream_interval": interval}
    choices = [event["choices"][0] for event in ask_now(house.app, path, body).events()]
    return [text for one in choices if (text := one["delta"].get("content") if path == CHAT else one["text"])]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_tokens_are_streamed_together(house: House, path: str) -> None:
    assert pieces(house, path, 4) == ["h", "ello", " the", "re"]
    assert pieces(house, path, None) == list("hello there")


def test_the_server_asks_for_the_least(house: House) -> None:
    patient = make_house(saying("hello there"), stream_interval=4)
    assert pieces(patient, TEXT, None) == pieces(patient, TEXT, 2) == ["h", "ello", " the", "re"]
    assert pieces(patient, TEXT, 8) == ["h", "ello the", "re"]
