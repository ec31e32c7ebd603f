"""Answers made of tokens that another engine has computed."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, House, ask_now, ids, make_house, saying

from octavo.engine.fake import FakeEngine, fake_info
from octavo.server.app import create_app
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

CHAT, TEXT = "/v1/chat/completions/derender", "/v1/completions/derender"
MARKED = (
    "{# </think> #}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}"
    "{% endfor %}[assistant]<think>\n"
)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def house() -> House:
    return make_house(saying("hi"))


def made(text: str, *, finish: str = "stop", index: int = 0, **fields: Any) -> dict[str, Any]:
    choice = {"index": index, "token_ids": ids(text), "finish_reason": finish, "logprobs": None}
    return {"request_id": "chatcmpl-r", "choices": [choice | fields], "prompt_logprobs": None}


def test_a_chat_is_made_of_its_tokens(house: House) -> None:
    answer = made("Paris.", finish="length")
    answer["choices"].append({"index": 1, "token_ids": [*ids("Rome"), 2], "finish_reason": "stop"})
    found = ask_now(house.app, CHAT, {"model": "toy", "generate_response": answer, "prompt_tokens": 7}).json()
    assert (found["id"], found["object"], found["model"]) == ("chatcmpl-r", "chat.completion", "toy")
    told = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in found["choices"]]
    assert told == [(0, "Paris.", "length"), (1, "Rome", "stop")]
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18}
    assert not house.engine.requests


def test_what_is_rendered_computed_and_made_an_answer_is_the_answer(house: House) -> None:
    rendered = ask_now(house.app, "/v1/chat/completions/render", HELLO).json()
    computed = ask_now(house.app, "/inference/v1/generate", rendered | {"stream": False}).json()
    found = ask_now(house.app, CHAT, {"generate_response": computed, "chat_request": HELLO}).json()
    whole = ask_now(house.app, "/v1/chat/completions", HELLO).json()
    assert found["choices"] == whole["choices"]


def test_log_probabilities_are_told_with_text(house: House) -> None:
    token, other = ids("ab")
    top = {"token": f"token_id:{other}", "logprob": -2.0, "bytes": None}
    entry = {"token": f"token_id:{token}", "logprob": -1.0, "bytes": None, "top_logprobs": [top]}
    answer = made("ab", logprobs={"content": [entry, entry | {"token": "b"}]})
    told = ask_now(house.app, CHAT, {"generate_response": answer}).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in told] == ["a", "b"]
    assert told[0]["bytes"] == [97]
    assert told[0]["top_logprobs"] == [{"token": "b", "logprob": -2.0, "bytes": [98]}]
    flat = ask_now(house.app, TEXT, {"generate_responses": [answer]}).json()["choices"][0]["logprobs"]
    assert (flat["tokens"], flat["token_logprobs"], flat["text_offset"]) == (["a", "b"], [-1.0, -1.0], [0, 1])
    unknown = made("a", logprobs={"content": [entry | {"token": "token_id:99999"}]})
    assert ask_now(house.app, CHAT, {"generate_response": unknown}).error()["param"] == "logprobs"


@pytest.mark.features("grammar")
def test_reasoning_and_calls_stand_where_the_chat_has_them() -> None:
    info = fake_info(name="toy", vocab_size=VOCAB_SIZE, features=["grammar"])
    app = create_app(
        Frontend(FakeEngine(saying("hi"), info=info), TOKENIZER, info, chat=ChatTemplate(MARKED, TOKENIZER))
    )
    text = 'Hm.</think><tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    asked = HELLO | {"tools": TOOLS}
    body = {"generate_response": made(text), "chat_request": asked}
    (choice,) = ask_now(app, CHAT, body).json()["choices"]
    assert choice["message"]["reasoning"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    body["chat_request"] = asked | {"include_reasoning": False}
    assert "reasoning" not in ask_now(app, CHAT, body).json()["choices"][0]["message"]
    del body["chat_request"]
    assert ask_now(app, CHAT, body).json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("ended", ["\n\n", 7, None])
def test_what_ended_an_answer_is_told_on(house: House, ended: Any) -> None:
    one = made("one")
    one["choices"][0]["stop_reason"] = ended
    for route, body in ((CHAT, {"generate_response": one}), (TEXT, {"generate_responses": [one]})):
        assert ask_now(house.app, route, body).json()["choices"][0]["stop_reason"] == ended


def test_texts_come_in_the_order_of_their_prompts(house: House) -> None:
    body = {"generate_responses": [made("one"), made("three")], "prompt_tokens": [5, 10]}
    found = ask_now(house.app, TEXT, body).json()
    assert [(one["index"], one["text"]) for one in found["choices"]] == [(0, "one"), (1, "three")]
    assert found["usage"] == {"prompt_tokens": 15, "completion_tokens": 8, "total_tokens": 23}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        (CHAT, {"generate_response": made("")}, 400, "generate_response.choices.0.token_ids"),
        (CHAT, {"generate_response": made("a", token_ids=None)}, 400, "generate_response.choices.0.token_ids"),
        (CHAT, {"generate_response": made("a", token_ids=[99999])}, 400, "token_ids"),
        (CHAT, {"generate_response": made("a" * 2000)}, 400, "token_ids"),
        (CHAT, {"generate_response": made("a"), "model": "other"}, 404, "model"),
        (TEXT, {"generate_responses": []}, 400, "generate_responses"),
        (TEXT, {"generate_responses": [made("a")], "prompt_tokens": [1, 2]}, 400, "prompt_tokens"),
    ],
)
def test_what_no_engine_answers_is_refused(
    house: House, route: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = ask_now(house.app, route, body)
    assert (answer.status, answer.error()["param"]) == (status, param)
