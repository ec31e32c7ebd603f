"""What the suites of other servers of this ecosystem assert, and clients therefore count on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_kit import HELLO, TEMPLATE, TOKENIZER, House, ask_now, get_now, ids, make_house, saying

from octavo.config import ModelConfig
from octavo.engine.fake import FakeEngine, fake_info
from octavo.hub.files import ModelFiles
from octavo.server.app import create_app
from octavo.text.answers.formats import AnswerFormats
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend
from octavo.text.model_text import load_text
from octavo.text.recipe import FrontendRecipe

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"prompt": "abcdefgh"}


@pytest.fixture
def house() -> House:
    return make_house(saying("hello"))


def test_a_whole_answer_has_null_where_nothing_was_asked_for(house: House) -> None:
    chat = ask_now(house.app, CHAT, HELLO).json()
    assert {"service_tier", "system_fingerprint", "prompt_token_ids", "prompt_logprobs"} <= chat.keys()
    assert chat["choices"][0]["token_ids"] is None
    text = ask_now(house.app, TEXT, ASKED).json()
    assert {"prompt_logprobs", "prompt_token_ids", "token_ids"} <= text["choices"][0].keys()
    chunk = ask_now(house.app, TEXT, ASKED | {"stream": True}).events()[0]["choices"][0]
    assert not {"prompt_logprobs", "prompt_token_ids", "token_ids"} & chunk.keys()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_goes_with_chunks_only_where_it_is_included(house: House, path: str) -> None:
    body = (HELLO if path == CHAT else ASKED) | {"stream": True}
    options = {"include_usage": False, "continuous_usage_stats": True}
    events = ask_now(house.app, path, body | {"stream_options": options}).events()
    assert len(events) > 1
    assert all(event["choices"] and "usage" not in event for event in events)


def test_a_message_may_come_in_many_ways(house: House) -> None:
    for parts in ([{"text": "Hello"}], ["Hello"], [{"type": "input_text", "text": "Hello"}]):
        assert ask_now(house.app, CHAT, {"messages": [{"role": "user", "content": parts}]}).status == 200
        assert house.engine.requests[-1].tokens == ids("[user]Hello\n[assistant]")
    silent = [*HELLO["messages"], {"role": "assistant", "content": None}, {"role": "my-own-role", "content": "x"}]
    answer = ask_now(house.app, CHAT, {"messages": silent})
    assert answer.json()["warnings"] == [
        "The chat template does not name the role `my-own-role`; the role was passed to it unchanged."
    ]
    assert house.engine.requests[-1].tokens == ids("[user]Hello\n[assistant]\n[my-own-role]x\n[assistant]")


def test_echo_begins_with_the_message_that_is_continued(house: House) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Oh, "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True, "add_generation_prompt": False}
    assert ask_now(house.app, CHAT, body).json()["choices"][0]["message"]["content"] == "Oh, hello"
    events = ask_now(house.app, CHAT, body | {"stream": True}).events()
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Oh, hello"
    assert ask_now(house.app, CHAT, HELLO | {"echo": True}).json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_but_the_echoed_prompt(house: House, stream: bool) -> None:
    answer = ask_now(house.app, TEXT, ASKED | {"echo": True, "max_tokens": 0, "logprobs": 1, "stream": stream})
    last = answer.events()[-1] if stream else answer.json()
    (choice,) = last["choices"]
    assert choice["text"] == "abcdefgh"
    assert choice["logprobs"]["tokens"] == list("abcdefgh")
    if not stream:
        assert last["usage"]["completion_tokens"] == 0
    assert ask_now(house.app, TEXT, ASKED | {"max_tokens": 0}).error()["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "fgh"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdefgh"),
    ],
)
def test_prompts_are_cut_on_demand(house: House, fields: dict[str, Any], kept: str) -> None:
    for prompt in ("abcdefgh", ids("abcdefgh")):
        assert ask_now(house.app, TEXT, {"prompt": prompt} | fields).status == 200
        assert house.engine.requests[-1].tokens == ids(kept)


def test_a_prompt_cut_to_fit_leaves_room_for_the_answer() -> None:
    house = make_house(saying("x"), max_model_len=40)
    body = {"prompt": "a" * 100, "max_tokens": 30, "truncate_prompt_tokens": -1}
    assert ask_now(house.app, TEXT, body).status == 200
    assert len(house.engine.requests[-1].tokens) == 10
    too_many = ask_now(house.app, TEXT, body | {"truncate_prompt_tokens": 41}).error()
    assert "smaller truncation size" in too_many["message"]


@pytest.mark.parametrize(
    ("settings", "unsaid", "asked"),
    [
        ({}, 9, 30),
        ({"generation_config": "none"}, None, 30),
        ({"override_generation_config": {"max_new_tokens": 7}}, 7, 7),
        ({"override_generation_config": {"max_tokens": 40}}, 40, 30),
        ({"override_generation_config": {"temperature": 0.5}}, 9, 30),
    ],
)
def test_the_operators_limit_of_answers(settings: dict[str, Any], unsaid: int | None, asked: int) -> None:
    """A model's `max_new_tokens` hold for requests that say nothing, the operator's for all."""
    made = {"max_new_tokens": 9}
    files = ModelFiles(name="toy", path=Path(), format="gguf", weights=(), config={}, generation_config=made)
    text = load_text(files, ModelConfig(skip_tokenizer_init=True, **settings))
    info = fake_info(name="toy", vocab_size=TOKENIZER.vocab_size, max_model_len=100)
    engine = FakeEngine(saying("x"), info=info)
    recipe = FrontendRecipe(files, ModelConfig())
    chat = ChatTemplate(TEMPLATE, TOKENIZER)
    app = create_app(recipe.make(engine, replace(text, tokenizer=TOKENIZER, chat=chat), AnswerFormats.of(chat)))
    for fields, want in (({}, unsaid), ({"max_tokens": 30, "min_tokens": 20}, asked)):
        assert ask_now(app, CHAT, HELLO | fields).status == 200
        request = engine.requests[-1]
        assert request.params.max_tokens == (want or 100 - len(request.tokens))


def test_documents_reach_a_template_that_has_a_place_for_them() -> None:
    info = fake_info(name="toy", vocab_size=TOKENIZER.vocab_size)
    engine = FakeEngine(saying("x"), info=info)
    chat = ChatTemplate(TEMPLATE + "{% for d in documents or [] %}<{{ d.text }}>{% endfor %}", TOKENIZER)
    app = create_app(Frontend(engine, TOKENIZER, info, chat=chat))
    assert ask_now(app, CHAT, HELLO | {"documents": [{"text": "read me"}]}).status == 200
    assert TOKENIZER.decode(engine.requests[-1].tokens).endswith("<read me>")


def test_one_route_for_all(house: House) -> None:
    for path, body in ((CHAT, HELLO), (TEXT, ASKED)):
        direct, invoked = (ask_now(house.app, one, body).json() for one in (path, "/invocations"))
        assert direct["choices"] == invoked["choices"]
        assert direct.keys() == invoked.keys()
    assert ask_now(house.app, "/invocations", HELLO | {"stream": True}).events()
    for wrong in ({"model": "toy"}, {"input": "x"}, [], b"{"):
        assert ask_now(house.app, "/invocations", wrong).status == 400


def test_several_conversations_in_one_request() -> None:
    house = make_house(lambda request: request.tokens[6:8])
    two = [[{"role": "user", "content": text}] for text in ("ab", "cd")]
    answer = ask_now(house.app, CHAT + "/batch", {"messages": two, "logprobs": True}).json()
    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [(0, "ab"), (1, "cd")]
    assert all(one["logprobs"]["content"] for one in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(len(request.tokens) for request in house.engine.requests)
    for fields, param in (
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"messages": [[]]}, "messages.0"),
        ({"messages": HELLO["messages"]}, "messages.0"),
        ({"messages": [two[0], [{"role": "user", "content": "x" * 9000}]]}, "messages.1"),
    ):
        assert ask_now(house.app, CHAT + "/batch", {"messages": two} | fields).error()["param"] == param


@pytest.mark.features("grammar")
@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"seed": 2**63}, "less_than_equal"),
        (CHAT, {"seed": -(2**63) - 1}, "greater_than_equal"),
        (CHAT, {"truncation_side": "up"}, "literal_error"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "Cannot set both `continue_final"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "json_schema.* must be provided"),
        (
            "/v1/responses",
            {"input": "x", "background": True, "store": False},
            "background can only be used when",
        ),
        ("/v1/responses", {"input": "x", "previous_response_id": "bad"}, "begins with 'resp_'"),
    ],
)
def test_sentences_that_clients_look_for(house: House, path: str, fields: dict[str, Any], words: str) -> None:
    error = ask_now(house.app, path, (HELLO if path == CHAT else {}) | fields).error()
    with pytest.raises(ValueError, match=words):
        raise ValueError(error["message"])


def test_responses_of_another_name(house: House) -> None:
    answer = ask_now(house.app, "/v1/responses", {"input": "x", "request_id": "resp_mine"}).json()
    assert answer["id"] == "resp_mine"
    gone = get_now(house.app, "/v1/responses/resp_other").error()
    assert gone["message"].startswith("Response with id 'resp_other' not found.")
    cancelled = ask_now(house.app, "/v1/responses/resp_mine/cancel").error()
    assert cancelled["message"].startswith("Cannot cancel a synchronous response.")
    counted = ask_now(house.app, "/v1/responses/input_tokens", {"input": "Hello"}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(ids("[user]Hello\n[assistant]"))}
    long = ask_now(house.app, "/v1/responses/input_tokens", {"input": "a" * 2000}).json()
    assert long["input_tokens"] == 2000 + len(ids("[user]\n[assistant]"))  # the context has 1,024


def test_tokens_of_a_conversation_with_tools(house: House) -> None:
    tool = {"type": "function", "function": {"name": "clock"}}
    asked = ask_now(house.app, CHAT, HELLO | {"tools": [tool]})
    assert asked.status == 400, "this engine has no grammar"
    told = ask_now(house.app, "/tokenize", HELLO | {"tools": [tool]}).json()
    assert "clock" in TOKENIZER.decode(told["tokens"])


def test_models_say_what_may_be_done_with_them(house: House) -> None:
    (card,) = get_now(house.app, "/v1/models").json()["data"]
    (permission,) = card["permission"]
    assert permission["allow_sampling"] is True


def test_what_the_template_made_is_told(house: House) -> None:
    asked = HELLO | {"return_prompt_text": True, "n": 2}
    written = "[user]Hello\n[assistant]"
    assert ask_now(house.app, CHAT, asked).json()["prompt_text"] == written
    assert ask_now(house.app, CHAT, HELLO).json()["prompt_text"] is None
    events = ask_now(house.app, CHAT, asked | {"stream": True}).events()
    assert [event["prompt_text"] for event in events if "prompt_text" in event] == [written]
    assert events[0]["prompt_text"] == written


def test_a_response_has_one_form(house: House) -> None:
    both = {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}
    message = ask_now(house.app, "/v1/responses", {"input": "Hello", **both}).error()["message"]
    assert "Cannot specify both structured_outputs and text.format" in message


def test_a_response_tells_what_was_read_and_written(house: House) -> None:
    asked = {"input": "Hello", "enable_response_messages": True}
    made = ask_now(house.app, "/v1/responses", asked).json()
    text = "[user]Hello\n[assistant]"
    assert made["input_messages"] == [{"type": "raw_message_tokens", "message": text, "tokens": ids(text)}]
    assert made["output_messages"] == [{"type": "raw_message_tokens", "message": "hello", "tokens": [*ids("hello"), 2]}]
    assert "input_messages" not in ask_now(house.app, "/v1/responses", {"input": "Hello"}).json()


def test_an_answers_id_is_that_of_the_header_before_that_of_the_body(house: House) -> None:
    own = HELLO | {"request_id": "body"}
    assert ask_now(house.app, CHAT, own).json()["id"] == "chatcmpl-body"
    assert ask_now(house.app, CHAT, own, headers={"x-request-id": "header"}).json()["id"] == "chatcmpl-header"
