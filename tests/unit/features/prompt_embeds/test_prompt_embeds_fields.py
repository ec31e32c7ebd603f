"""`prompt_embeds` of text completions, alone or beside prompts, and among the parts of chats; what can't be had."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch
from server_kit import HELLO, House, ask_now, ids, make_house, saying

from octavo.config import ServerConfig

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def in_base64(*shape: int) -> str:
    file = io.BytesIO()
    torch.save(torch.ones(shape), file)
    return base64.b64encode(file.getvalue()).decode()


ONE, TWO, WIDE = in_base64(3, 4), in_base64(5, 4), in_base64(3, 5)


def house(**info: Any) -> House:
    return make_house(saying("x"), **({"features": ["prompt_embeds"], "hidden_size": 4} | info))


@pytest.mark.parametrize("prompt", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}])
def test_embeddings_need_no_other_prompt(prompt: dict[str, Any]) -> None:
    place = house()
    answer = ask_now(place.app, TEXT, {"prompt_embeds": ONE, "return_token_ids": True} | prompt)
    assert answer.status == 200
    assert answer.json()["usage"]["prompt_tokens"] == 3
    assert [choice["text"] for choice in answer.json()["choices"]] == ["x"]
    assert answer.json()["choices"][0]["prompt_token_ids"] == [-1] * 3
    assert [request.tokens for request in place.engine.requests] == [[-1] * 3]


def test_embeddings_come_before_prompts() -> None:
    place = house()
    answer = ask_now(place.app, TEXT, {"prompt_embeds": [ONE, TWO], "prompt": ["a", "b"], "n": 2})
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(8))
    assert answer.json()["usage"]["prompt_tokens"] == 3 + 5 + 2
    order = sorted(place.engine.requests, key=lambda request: request.arrival)
    assert [request.tokens for request in order] == [[-1] * 3, [-1] * 5, ids("a"), ids("b")]


def test_they_are_streamed_as_prompts_are() -> None:
    events = ask_now(house().app, TEXT, {"prompt_embeds": [ONE], "stream": True}).events()
    assert "".join(event["choices"][0]["text"] for event in events) == "x"


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_no_embeddings_are_none(nothing: Any) -> None:
    place = house(features=[])
    assert ask_now(place.app, TEXT, {"prompt": "a", "prompt_embeds": nothing}).status == 200
    refused = ask_now(place.app, TEXT, {"prompt_embeds": nothing})
    assert (refused.status, refused.error()["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt_embeds": 5}, "prompt_embeds", "must be a string"),
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds", "must be a string"),
        ({"prompt_embeds": "rubbish!"}, "prompt_embeds", "not valid base64"),
        ({"prompt_embeds": WIDE}, "prompt_embeds", "hidden size: [tokens, 4], got [3, 5]"),
        ({"prompt_embeds": [ONE, WIDE]}, "prompt_embeds.1", "hidden size: [tokens, 4], got [3, 5]"),
        ({"prompt_embeds": [ONE], "prompt": ["a", "b" * 5000]}, "prompt.1", "maximum context length"),
        ({"prompt_embeds": ONE, "echo": True}, "echo", "unsupported with prompt embeds"),
        ({"prompt_embeds": ONE, "suffix": "b"}, "suffix", "unsupported with prompt embeds"),
        ({"prompt_embeds": ONE, "prompt_logprobs": 1}, "prompt_logprobs", "not compatible with prompt embeds"),
        ({"prompt_embeds": ONE, "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "cut the tensor"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, text: str) -> None:
    place = house()
    error = ask_now(place.app, TEXT, fields).error()
    assert (error["code"], error["param"], text in error["message"]) == (400, param, True), error
    assert place.engine.requests == []


def test_a_server_without_them_says_how_to_start_it() -> None:
    error = ask_now(house(features=[]).app, TEXT, {"prompt_embeds": ONE}).error()
    assert (error["param"], "--enable-prompt-embeds" in error["message"]) == ("prompt_embeds", True)


def test_nothing_is_rendered() -> None:
    place, chat = house(), {"messages": [{"role": "user", "content": [part(ONE)]}]}
    assert ask_now(place.app, "/v1/completions/render", {"prompt_embeds": ONE}).error()["param"] == "prompt_embeds"
    assert ask_now(place.app, "/v1/chat/completions/render", chat).error()["param"] == "prompt_embeds"
    assert ask_now(place.app, CHAT, HELLO | {"prompt_embeds": ONE}).json()["warnings"]


def part(data: Any = ONE) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": data}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_parts_of_a_chat_stand_where_they_were_sent() -> None:
    place = house()
    messages = [
        {"role": "system", "content": [part(TWO)]},
        {"role": "user", "content": [text("see"), part(ONE), part(ONE), text("octavo-embeds-0;")]},
    ]
    answer = ask_now(place.app, CHAT, {"messages": messages, "return_prompt_text": True})
    (request,) = place.engine.requests
    end = ids("\noctavo-embeds-0;\n[assistant]")
    user = [*ids("\n[user]see\n"), *[-1] * 3, *ids("\n"), *[-1] * 3]
    assert request.tokens == [*ids("[system]"), *[-1] * 5, *user, *end]
    assert answer.json()["usage"]["prompt_tokens"] == len(request.tokens)
    assert answer.json()["prompt_text"] == "[system]\n[user]see\n\n\noctavo-embeds-0;\n[assistant]"
    streamed = ask_now(place.app, CHAT, {"messages": messages, "stream": True}).events()
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == "x"


@pytest.mark.parametrize(
    ("content", "fields", "param", "says"),
    [
        ([part("")], {}, "messages.0.content.0.data", "requires a non-empty tensor"),
        ([text("a"), {"type": "prompt_embeds"}], {}, "messages.0.content.1.data", "requires a non-empty tensor"),
        ([text("a"), part("rubbish!")], {}, "messages.0.content.1.data", "not valid base64"),
        ([part(5)], {}, "messages.0.content.0.data", "got int"),
        ([part(), part(WIDE)], {}, "messages.0.content.1.data", "hidden size: [tokens, 4], got [3, 5]"),
        ([part()], {"echo": True}, "echo", "can't be combined"),
        ([part()], {"add_special_tokens": True}, "add_special_tokens", "can't be combined"),
        ([part()], {"top_logprobs": 1, "prompt_logprobs": 1, "logprobs": True}, "prompt_logprobs", "not compatible"),
        ([{"type": "image_url"}], {}, "messages.0.content", "only text parts"),
    ],
)
def test_what_a_chat_refuses(content: Any, fields: dict[str, Any], param: str, says: str) -> None:
    place = house()
    error = ask_now(place.app, CHAT, {"messages": [{"role": "user", "content": content}]} | fields).error()
    assert (error["code"], error["param"], says in error["message"]) == (400, param, True), error
    assert place.engine.requests == []


def test_a_template_that_leaves_one_out_is_no_silent_loss() -> None:
    messages = [{"role": "user", "content": [part()]}, {"role": "user", "content": "b"}]
    body = {"messages": messages, "chat_template": "{{ messages[-1].content }}"}
    trusting = make_house(
        saying("x"), ServerConfig(trust_request_chat_template=True), features=["prompt_embeds"], hidden_size=4
    )
    error = ask_now(trusting.app, CHAT, body).error()
    assert (error["param"], "leaves" in error["message"]) == ("messages.0.content.0.data", True)
