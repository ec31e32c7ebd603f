"""What newcomers get wrong is refused, or named in the answer's warnings, in words that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_kit import HELLO, ask_now, make_house, saying

from octavo.config import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = {"prompt": "a"}
APP = make_house(saying("fine")).app


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        (TEXT, PROMPT),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", HELLO | {"max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),
    ],
)
def test_no_route_ignores_a_feature_that_is_missing(path: str, body: dict[str, Any]) -> None:
    for field, neutral in (("lora_request", {}), ("speculative_config", None), ("images", [])):
        asked = ask_now(APP, path, body | {field: {"name": "a"}})
        assert (asked.status, asked.json()["error"]["param"]) == (400, field)
        answer = ask_now(APP, path, body | {field: neutral})
        assert answer.status == 200
        assert not answer.json().get("warnings")


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("temprature", "; did you mean temperature?"),
        ("num_predict", "; did you mean max_tokens?"),
        ("extra_body", ": send its fields at the top of the body."),
        ("what", "."),
    ],
)
def test_the_warning_about_an_unknown_field_says_what_may_be_meant(field: str, hint: str) -> None:
    answer = ask_now(APP, CHAT, HELLO | {field: 1}).json()
    assert answer["warnings"] == [f"The unknown field `{field}` was ignored{hint}"]


@pytest.mark.parametrize(
    ("role", "meant"), [("usr", "user"), ("User", "user"), ("asistant", "assistant"), ("human", "user")]
)
def test_a_misspelled_role_is_refused(role: str, meant: str) -> None:
    for path, body in ((CHAT, {"messages": [{"role": role, "content": "a"}]}),):
        message = ask_now(APP, path, body).error()["message"]
        assert f"The role {role!r} is not in this model's chat template; did you mean {meant}?" in message
    asked = {"input": [{"role": role, "content": "a"}]}
    assert ask_now(APP, "/v1/responses", asked).status == 400


def test_a_role_of_ones_own_is_told() -> None:
    body = {"messages": [{"role": "narrator", "content": "a"}]}
    assert "does not name the role `narrator`" in ask_now(APP, CHAT, body).json()["warnings"][0]
    strict = make_house(saying("x"), ServerConfig(strict_params=True, response_role="narrator")).app
    assert ask_now(strict, CHAT, body).status == 200
    error = ask_now(strict, CHAT, {"messages": [{"role": "critic", "content": "a"}]}).error()
    assert "choose one of system, developer, user, assistant, tool, function." in error["message"]


def test_images_of_a_message_are_refused() -> None:
    body = {"messages": [{"role": "user", "content": "What is this?", "images": ["aGk="]}]}
    assert "messages[0].images is not supported" in ask_now(APP, CHAT, body).error()["message"]


@pytest.mark.parametrize("end", [b'"}', b'x"}', b'\\n"}', b' and more of it"}', b'\\ud83d"}'])
def test_half_of_a_surrogate_pair_is_called_that(end: bytes) -> None:
    message = ask_now(APP, TEXT, b'{"prompt":"a\\ud83d' + end).error()["message"]
    assert "half of a surrogate pair" in message
    assert "Close all" not in message


@pytest.mark.parametrize("body", [b'{"prompt":"a\\ud83d', b'{"prompt":"a\\ud83d\\ude'])
def test_a_body_that_ends_within_a_pair_is_truncated(body: bytes) -> None:
    assert "Close all its strings" in ask_now(APP, TEXT, body).error()["message"]


def test_a_fault_of_json_is_shown() -> None:
    message = ask_now(APP, CHAT, b'{"stream": True}').error()["message"]
    assert "invalid character (byte 11), at 'True}'." in message


def test_a_mark_of_byte_order_does_no_harm() -> None:
    assert ask_now(APP, CHAT, b"\xef\xbb\xbf" + json.dumps(HELLO).encode()).status == 200


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, PROMPT, "messages is required; a chat has messages; send a prompt to /v1/completions."),
        (TEXT, HELLO, "prompt is required; send messages to /v1/chat/completions."),
        (
            CHAT,
            HELLO | {"tools": [{"type": "function", "name": "f"}]},
            "tools.0.function is required; in a chat a tool",
        ),
        (CHAT, HELLO | {"max_tokens": 5.5}, "max_tokens must be an integer, got 5.5."),
        (CHAT, HELLO | {"structured_outputs": {"json": [1]}}, "structured_outputs.json must be a string or an object,"),
        (CHAT, HELLO | {"truncation_side": "up"}, "truncation_side must be 'left' or 'right', got 'up'."),
        (
            "/v1/responses",
            {"input": "a", "max_tokens": 3},
            "max_tokens is called max_output_tokens in the Responses API.",
        ),
        ("/v1/responses", {"input": "a", **HELLO}, "messages is called input in the Responses API."),
    ],
)
def test_errors_say_what_is_meant(path: str, body: dict[str, Any], said: str) -> None:
    assert ask_now(APP, path, body).error()["message"].startswith(said)


def test_a_prompt_that_is_too_long_is_told_with_its_tokens_and_the_limit() -> None:
    message = ask_now(APP, TEXT, {"prompt": "a" * 5000}).error()["message"]
    assert message == (
        "This model's maximum context length is 1024 tokens. However, your prompt resulted in 5000 tokens. "
        "Please reduce the length of the input prompt. (parameter=prompt)"
    )
