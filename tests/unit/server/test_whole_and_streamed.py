"""A stream, put together, is the whole answer; and both are what the engine said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_kit import HELLO, TOKENIZER, VOCAB_SIZE, House, ask_now, echoing, ids, make_house, saying

from octavo.config import ServerConfig

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

unicode_text = st.text(
    st.one_of(st.sampled_from('ab <>/\n\u2028\u2029\x85\x0b"\\é日😀\u0301'), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=40,
)


class Script:
    """A script that tests can change under one app, which is costly to make."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, request: Any) -> Any:
        return [ids(text) for text in self.texts]


SCRIPT = Script()
APP = make_house(SCRIPT, ServerConfig(max_stop_strings=8)).app


def join_chat(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Per choice: its text, its logprobs, how it ended."""
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            one = joined.setdefault(choice["index"], {"text": "", "logprobs": [], "ids": [], "end": None})
            assert one["end"] is None, "a choice went on after its end"
            one["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if choice["logprobs"]:
                one["logprobs"].append(choice["logprobs"])
            one["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"]:
                one["end"] = (choice["finish_reason"], choice["stop_reason"])
            else:
                assert "stop_reason" not in choice
    return joined


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chat_pieces_join_to_the_whole(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    SCRIPT.texts = [data.draw(unicode_text) for _ in range(n)]
    source = SCRIPT.texts[0]
    start = data.draw(st.integers(0, len(source) - 1))
    stops = data.draw(st.sampled_from([None, source[start : start + 3], [source[start:], "zz"]]))
    body = HELLO | {"n": n, "stop": stops, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}

    whole = ask_now(APP, CHAT, body).json()
    streamed = ask_now(APP, CHAT, body | {"stream": True}).events()

    joined = join_chat(streamed)
    assert sorted(joined) == list(range(n))
    for choice in whole["choices"]:
        one = joined[choice["index"]]
        assert one["text"] == choice["message"]["content"]
        assert one["end"] == (choice["finish_reason"], choice["stop_reason"])
        assert one["ids"] == choice["token_ids"]
        assert [entry for part in one["logprobs"] for entry in part["content"]] == choice["logprobs"]["content"]
        said = SCRIPT.texts[choice["index"]]
        asked = [stops] if isinstance(stops, str) else stops or []
        found = [(said.find(stop) + len(stop), said.find(stop)) for stop in asked if stop in said]
        cuts = [begin for end, begin in found if end == min(found)[0]]  # of the one that is complete first
        assert choice["message"]["content"] in ([said[:cut] for cut in cuts] or [said])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_completion_pieces_join_to_the_whole(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 2))
    SCRIPT.texts = [data.draw(unicode_text) for _ in range(n)]
    prompts = data.draw(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
    stop = data.draw(st.sampled_from([None, SCRIPT.texts[0][-2:]]))
    body = {"prompt": prompts, "n": n, "stop": stop, "logprobs": 1, "max_tokens": 300}

    whole = ask_now(APP, TEXT, body).json()
    streamed = ask_now(APP, TEXT, body | {"stream": True, "stream_options": {"include_usage": True}}).events()

    assert [choice["index"] for choice in whole["choices"]] == list(range(n * len(prompts)))
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
    joined = join_chat(streamed)
    for choice in whole["choices"]:
        one = joined[choice["index"]]
        assert one["text"] == choice["text"]
        assert one["end"] == (choice["finish_reason"], choice["stop_reason"])
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [entry for part in one["logprobs"] for entry in part[field]] == choice["logprobs"][field]


@pytest.fixture
def hello() -> House:
    return make_house(saying("Héllo 😀"))


def test_the_events_of_a_chat(hello: House) -> None:
    answer = ask_now(hello.app, CHAT, HELLO | {"stream": True}, headers={"X-Request-Id": "abc"})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "abc"
    events = answer.events()
    assert events[0] == {
        "id": "chatcmpl-abc",
        "object": "chat.completion.chunk",
        "created": events[0]["created"],
        "model": "toy",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert all(
        {key: event[key] for key in ("id", "created", "model", "object")}
        == {key: events[0][key] for key in ("id", "created", "model", "object")}
        for event in events
    )
    assert [event["choices"][0]["delta"]["content"] for event in events[1:-1]] == ["H", "é", "l", "l", "o", " ", "😀"]
    assert events[-1]["choices"] == [
        {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_every_choice_opens_with_its_role() -> None:
    events = ask_now(make_house(saying("one", "second", "3")).app, CHAT, HELLO | {"n": 3, "stream": True}).events()
    roles = [event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]]
    assert roles == [0, 1, 2]
    first_seen: dict[int, Any] = {}
    for event in events:
        first_seen.setdefault(event["choices"][0]["index"], event["choices"][0]["delta"])
    assert all(delta == {"role": "assistant", "content": ""} for delta in first_seen.values())
    assert {index: one["text"] for index, one in join_chat(events).items()} == {0: "one", 1: "second", 2: "3"}
    order = [event["choices"][0]["index"] for event in events if event["choices"][0]["delta"].get("content")]
    assert order[:6] == [0, 1, 2, 0, 1, 0] or order[:6] == [0, 1, 2, 0, 1, 1], "choices should interleave"


def test_usage_is_told_when_asked_for(hello: House) -> None:
    expected = {
        "prompt_tokens": len("[user]Hello\n[assistant]"),
        "completion_tokens": len("Héllo 😀".encode()) + 1,
        "total_tokens": len("[user]Hello\n[assistant]") + len("Héllo 😀".encode()) + 1,
    }
    assert ask_now(hello.app, CHAT, HELLO).json()["usage"] == expected

    plain = ask_now(hello.app, CHAT, HELLO | {"stream": True}).events()
    assert all("usage" not in event for event in plain)

    asked = ask_now(hello.app, CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}}).events()
    assert all(event["usage"] is None for event in asked[:-1])
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == expected

    options = {"include_usage": True, "continuous_usage_stats": True}
    always = ask_now(hello.app, CHAT, HELLO | {"stream": True, "stream_options": options}).events()
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts)
    assert always[-1]["usage"] == expected


def test_usage_can_be_forced() -> None:
    app = make_house(saying("hi"), ServerConfig(enable_force_include_usage=True)).app
    for options in (None, {"include_usage": False}):
        events = ask_now(app, CHAT, HELLO | {"stream": True, "stream_options": options}).events()
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 3


def test_usage_tells_of_cached_tokens_where_the_server_was_asked_to() -> None:
    app = make_house(saying("hi"), ServerConfig(enable_prompt_tokens_details=True)).app
    assert ask_now(app, CHAT, HELLO).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_unknown_fields_are_told_once(hello: House) -> None:
    body = HELLO | {"colour": "red"}
    warning = ["The unknown field `colour` was ignored."]
    assert ask_now(hello.app, CHAT, body).json()["warnings"] == warning
    assert "warnings" not in ask_now(hello.app, CHAT, HELLO).json()
    for options in (None, {"include_usage": True}):
        events = ask_now(hello.app, CHAT, body | {"stream": True, "stream_options": options}).events()
        assert [event.get("warnings") for event in events] == [None] * (len(events) - 1) + [warning]
    texts = ask_now(hello.app, TEXT, {"prompt": ["a", "b"], "stream": True, "colour": 1}).events()
    assert [event.get("warnings") for event in texts] == [None] * (len(texts) - 1) + [warning]


def test_prompts_as_text_and_as_tokens() -> None:
    app = make_house(echoing).app
    for prompt, expected in [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (ids("xyz"), ["xyz"]),
        ([ids("x"), ids("yz")], ["x", "yz"]),
    ]:
        answer = ask_now(app, TEXT, {"prompt": prompt})
        assert [choice["text"] for choice in answer.json()["choices"]] == expected


def test_limits_of_length() -> None:
    app = make_house(saying("x" * 2000)).app
    assert ask_now(app, TEXT, {"prompt": "a"}).json()["usage"]["completion_tokens"] == 16
    rest = ask_now(app, TEXT, {"prompt": "a", "max_tokens": None}).json()
    assert rest["usage"]["completion_tokens"] == 1023
    assert rest["choices"][0]["finish_reason"] == "length"
    chat = ask_now(app, CHAT, HELLO).json()
    assert chat["usage"]["total_tokens"] == 1024
    short = ask_now(app, CHAT, HELLO | {"max_completion_tokens": 3, "max_tokens": 9}).json()
    assert short["choices"][0]["message"] == {"role": "assistant", "content": "xxx", "refusal": None}


def test_logprobs_in_both_forms(hello: House) -> None:
    chat = ask_now(hello.app, CHAT, HELLO | {"logprobs": True, "top_logprobs": 3}).json()["choices"][0]
    content = chat["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]) == "Héllo 😀".encode()
    assert content[0]["token"] == "H"
    assert content[0]["logprob"] == -0.5
    assert len(content[0]["top_logprobs"]) == 3
    assert content[0]["top_logprobs"][0] == {"token": "H", "logprob": -0.5, "bytes": [72]}
    assert sorted((e["logprob"] for e in content[0]["top_logprobs"]), reverse=True) == [
        e["logprob"] for e in content[0]["top_logprobs"]
    ]
    none = ask_now(hello.app, CHAT, HELLO | {"logprobs": True}).json()["choices"][0]["logprobs"]["content"][0]
    assert none["top_logprobs"] == []

    text = ask_now(hello.app, TEXT, {"prompt": "a", "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert text["tokens"][:2] == ["H", "�"]
    assert text["token_logprobs"][0] == -0.5
    assert len(text["top_logprobs"][0]) == 2
    assert text["text_offset"][:3] == [0, 1, 2]
    zero = ask_now(hello.app, TEXT, {"prompt": "a", "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"][0] == {"H": -0.5}, "what was chosen is always told"
    as_ids = {"logprobs": 0, "return_tokens_as_token_ids": True}
    marked = ask_now(hello.app, TEXT, {"prompt": "a"} | as_ids).json()["choices"][0]["logprobs"]
    assert marked["tokens"][0] == f"token_id:{ids('H')[0]}"


def test_token_ids_come_back_when_asked_for(hello: House) -> None:
    chat = ask_now(hello.app, CHAT, HELLO | {"return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == ids("[user]Hello\n[assistant]")
    assert chat["choices"][0]["token_ids"] == [*ids("Héllo 😀"), 2]
    events = ask_now(hello.app, CHAT, HELLO | {"return_token_ids": True, "stream": True}).events()
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [chat["prompt_token_ids"]]
    body = {"prompt": ["p", "q"], "return_token_ids": True}
    texts = ask_now(hello.app, TEXT, body).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in texts] == [ids("p"), ids("q")]
    streamed = ask_now(hello.app, TEXT, body | {"stream": True}).events()
    parts = [event["choices"][0] for event in streamed]
    assert {p["index"]: p["prompt_token_ids"] for p in parts if "prompt_token_ids" in p} == {0: ids("p"), 1: ids("q")}


def test_parameters_reach_the_engine(hello: House) -> None:
    body = HELLO | {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "stop": "zz",
        "stop_token_ids": [9],
        "ignore_eos": False,
        "min_tokens": 1,
        "max_tokens": 12,
        "logit_bias": {"5": -100, "6": 1.5},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "priority": -3,
        "cache_salt": "tenant",
        "n": 2,
        "user": "someone",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
    }
    assert ask_now(hello.app, CHAT, body).status == 200
    request = hello.engine.requests[-1]
    params = request.params
    as_given = (
        "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed stop_token_ids "
        "ignore_eos min_tokens max_tokens skip_special_tokens include_stop_str_in_output n"
    )
    for name in as_given.split():
        assert getattr(params, name) == body[name], name
    assert params.stop_strings == ["zz"]
    assert params.logit_bias == {5: -100.0, 6: 1.5}
    assert request.priority == -3
    assert "tenant" in request.namespace
    assert request.tokens == ids("[user]Hello\n[assistant]")


def test_messages_become_a_prompt(hello: House) -> None:
    def prompt(**body: Any) -> str:
        answer = ask_now(hello.app, CHAT, body)
        assert answer.status == 200, answer.body
        return "".join(map(TOKENIZER.token_text, hello.engine.requests[-1].tokens))

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(messages=[{"role": "user", "content": parts}]) == "[user]a\nb\n[assistant]"
    assert prompt(messages=[{"role": "developer", "content": "x"}]) == "[system]x\n[assistant]"
    assert prompt(messages=HELLO["messages"], add_generation_prompt=False) == "[user]Hello\n"
    goes_on = [*HELLO["messages"], {"role": "assistant", "content": "So"}]
    assert prompt(messages=goes_on, continue_final_message=True) == "[user]Hello\n[assistant]So"


def test_a_template_of_the_requests_own_needs_trust(hello: House) -> None:
    body = HELLO | {"chat_template": "{{ messages[0]['content'] }}{{ tail }}", "chat_template_kwargs": {"tail": "!"}}
    refused = ask_now(hello.app, CHAT, body)
    assert refused.status == 400
    assert refused.error()["param"] == "chat_template"
    trusting = make_house(echoing, ServerConfig(trust_request_chat_template=True))
    assert ask_now(trusting.app, CHAT, body).json()["choices"][0]["message"]["content"] == "Hello!"
    broken = ask_now(trusting.app, CHAT, HELLO | {"chat_template": "{% if %}"})
    assert broken.status == 400
    assert broken.error()["param"] == "chat_template"


def test_tokens_there_and_back(hello: House) -> None:
    there = ask_now(hello.app, "/tokenize", {"prompt": "é", "return_token_strs": True}).json()
    assert there == {"count": 2, "max_model_len": 1024, "tokens": ids("é"), "token_strs": ["Ã", "©"]}
    assert ask_now(hello.app, "/detokenize", {"tokens": there["tokens"]}).json() == {"prompt": "é"}
    chat = ask_now(hello.app, "/tokenize", HELLO).json()
    assert chat["tokens"] == ids("[user]Hello\n[assistant]")
    assert ask_now(hello.app, "/tokenize", {}).error()["param"] == "prompt"
    assert ask_now(hello.app, "/detokenize", {"tokens": [VOCAB_SIZE]}).error()["param"] == "tokens"
