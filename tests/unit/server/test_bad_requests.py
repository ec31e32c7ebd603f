"""Every bad request gets the right status and a whole error object that names the field, and the server serves on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_kit import HELLO, VOCAB_SIZE, Visitor, ask, ask_now, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import InvalidRequestError, QueueFullError

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = {"prompt": "a"}
APP = make_house(saying("fine"), ServerConfig(max_body_bytes=200_000, max_prompts=3, max_n=8)).app

BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [str(number) for number in range(100)]}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1.5": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "much"}}, "logit_bias"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(number): 1 for number in range(VOCAB_SIZE + 1)}}, "logit_bias"),
    ({"stop_token_ids": [1] * (VOCAB_SIZE + 1)}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "x" * 200}, "request_id"),
    ({"request_id": "a\n2026-01-01 INFO a line of its own"}, "request_id"),
    ({"request_id": "a\x1b[2J"}, "request_id"),
    ({"request_id": "a\u2028b"}, "request_id"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"repetition_detection": {"max_pattern_size": 0}}, "repetition_detection"),
    ({"repetition_detection": {}}, "repetition_detection.max_pattern_size"),
    ({"echo": 0}, "echo"),
    ({"best_of": True}, "best_of"),
    ({"length_penalty": True}, "length_penalty"),
]
CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages.0"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": 1, "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": {}, "text": "Hi"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 150_000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]
TEXT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [5, VOCAB_SIZE]}, "prompt"),
    ({"prompt": [5, -1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 4}, "prompt"),
    ({"prompt": "x" * 1100}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "z"}, "suffix"),
    ({"best_of": 9}, "best_of"),
    ({"best_of": 9, "n": 2}, "best_of"),
]
CASES = [
    *((CHAT, HELLO | change, param) for change, param in BOTH + CHAT_ONLY),
    *((TEXT, PROMPT | change, param) for change, param in BOTH + TEXT_ONLY),
]


def serves_on() -> bool:
    answer = ask_now(APP, CHAT, HELLO)
    return answer.status == 200 and answer.json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param"), CASES, ids=lambda case: str(case)[:60])
def test_a_bad_field_is_named(path: str, body: dict[str, Any], param: str, stream: bool) -> None:
    if stream and "stream" not in body and "stream_options" not in body:
        body = body | {"stream": True}
    answer = ask_now(APP, path, body)
    assert answer.status == 400, answer.body
    error = answer.error()
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    assert param.split(".")[0] in error["message"] or "context length" in error["message"]
    assert len(error["message"]) < 600
    assert serves_on()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "text"}},
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"echo": False},
        {"suffix": None},
        {"prompt_logprobs": None},
        {"use_beam_search": False},
        {"chat_template_kwargs": {"self": 1, "content_format": 2, "template_kwargs": 3, "loop": 4}},
        {"logit_bias": None, "stop": None, "n": None, "temperature": None, "seed": None, "stream": None},
        {"stop": []},
        {"stop": ["a", "b", "c", "d"]},
        {"temperature": 0, "top_k": -1},
        {"temperature": 2, "top_p": 1},
        {"seed": -5},
        {"request_id": "my request, ü-1"},
        {"model": "toy"},
        {"model": None},
    ],
)
def test_what_asks_for_nothing_special_is_fine(path: str, change: dict[str, Any]) -> None:
    answer = ask_now(APP, path, (HELLO if path == CHAT else PROMPT) | change)
    assert answer.status == 200, answer.body


def test_tools_that_may_not_be_used_are_fine() -> None:
    offered = [{"type": "function", "function": {"name": "f"}}]
    for tools in (
        {"tools": offered, "tool_choice": "none"},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [], "parallel_tool_calls": True},
    ):
        answer = ask_now(APP, CHAT, HELLO | tools)
        assert answer.status == 200
        assert "warnings" not in answer.json()


def test_a_required_field_is_asked_for() -> None:
    for path, param in ((CHAT, "messages"), (TEXT, "prompt"), ("/detokenize", "tokens")):
        error = ask_now(APP, path, {}).error()
        assert error["param"] == param
        assert error["message"].startswith(f"{param} is required")


def test_an_exceeded_context_is_told_with_counts() -> None:
    error = ask_now(APP, TEXT, {"prompt": "x" * 1100}).error()
    assert "This model's maximum context length is 1024 tokens" in error["message"]
    assert "1100" in error["message"]
    error = ask_now(APP, TEXT, {"prompt": "x" * 1000, "max_tokens": 100}).error()
    assert "you requested 1100 tokens" in error["message"]


def test_an_unknown_model_is_told_what_is_served() -> None:
    for path, body in ((CHAT, HELLO), (TEXT, PROMPT), ("/tokenize", PROMPT), ("/detokenize", {"tokens": [5]})):
        answer = ask_now(APP, path, body | {"model": "gpt-9"})
        assert answer.status == 404
        error = answer.error()
        assert error["message"].startswith("The model `gpt-9` does not exist.")
        assert "`toy`" in error["message"]
        assert (error["type"], error["param"]) == ("NotFoundError", "model")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "not valid JSON"),
        (b'{"messages": [}', "not valid JSON"),
        (b"{'messages': 1}", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"user": "\\ud800"}', "not valid JSON"),
        (b'{"user": "\xff\xfe"}', "not valid UTF-8"),
        (b'\xff{"user": 1}', "not valid"),
        (b"[]", "must be a JSON object, got an array"),
        (b'"text"', "must be a JSON object, got a string"),
        (b"null", "must be a JSON object, got null"),
        (b"true", "must be a JSON object, got a boolean"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply"),
        (b'{"metadata": ' + b'{"a":' * 80 + b"1" + b"}" * 80 + b"}", "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 62 + b"]" * 62 + b"}]}", "nested too deeply"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_a_body_that_is_no_json_object(data: bytes, says: str) -> None:
    for path in (CHAT, TEXT, "/tokenize"):
        answer = ask_now(APP, path, data)
        assert answer.status == 400
        assert says in answer.error()["message"]
    assert serves_on()


def test_many_brackets_in_text_are_no_nesting() -> None:
    assert ask_now(APP, CHAT, {"messages": [{"role": "user", "content": "[{" * 100}]}).status == 200


def test_a_body_that_is_too_large() -> None:
    big = json.dumps(HELLO | {"user": "x" * 200_000}).encode()
    for options in ({}, {"parts": [big[:100_000], big[100_000:]]}):
        answer = ask_now(APP, CHAT, big, **options)
        assert answer.status == 413
        assert "--max-body-bytes" in answer.error()["message"]
        assert "200,000" in answer.error()["message"]
    assert serves_on()


def test_a_body_in_parts_is_read_whole() -> None:
    data = json.dumps(HELLO).encode()
    assert ask_now(APP, CHAT, parts=[data[:5], b"", data[5:]]).status == 200


def test_a_content_length_beyond_all_numbers() -> None:
    assert ask_now(APP, CHAT, HELLO, headers={"content-length": "9" * 5000}).status == 413


def test_a_content_length_that_is_no_number_is_not_trusted() -> None:
    assert ask_now(APP, CHAT, HELLO, headers={"content-length": "many"}).status == 200


def test_only_json_is_read() -> None:
    for kind, status in {
        "application/x-www-form-urlencoded": 415,
        "text/plain": 415,
        "multipart/form-data; boundary=x": 415,
        "application/json; charset=utf-8": 200,
        "APPLICATION/JSON": 200,
        "": 200,
    }.items():
        answer = ask_now(APP, CHAT, HELLO, headers={"content-type": kind})
        assert answer.status == status, kind
        if status == 415:
            assert "application/json" in answer.error()["message"]


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 200), ("", 200)])
def test_a_compressed_body_is_refused_as_such(coding: str, status: int) -> None:
    answer = ask_now(APP, CHAT, HELLO, headers={"content-encoding": coding})
    assert answer.status == status
    if status == 415:
        assert f"got Content-Encoding: {coding}. Send the JSON uncompressed." in answer.error()["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"functions": [{"name": "f"}]}, "functions is not supported by this version; declare them as tools."),
        ({"adapter_id": "a"}, "adapter_id is not supported by this version; name an adapter as the model, if"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is not supported by this version; the server dra"),
        ({"images": ["aGk="]}, "images is not supported by this version; images are parts of messages."),
        ({"mirostat": 2}, "mirostat is not supported by this version; use temperature, top_p, top_k or min_p."),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp is not a known field;"),
    ],
)
def test_what_to_do_instead(body: dict[str, Any], said: str) -> None:
    assert ask_now(APP, CHAT, HELLO | body).error()["message"].startswith(said)


def test_routes_and_methods_that_do_not_exist() -> None:
    answer = get_now(APP, "/v1/nothing")
    assert answer.status == 404
    assert "/v1/nothing" in answer.error()["message"]
    assert "/openapi.json lists them" in answer.error()["message"]
    for path, meant in (("/models", "/v1/models"), ("/v1/v1/models", "/v1/models"), ("/helth", "/health")):
        assert f"did you mean {meant}?" in get_now(APP, path).error()["message"]
    for path in ("/v1/realtime", "/v1/audio/speech"):
        assert get_now(APP, path).error()["message"].endswith("not supported by this version.")
    for path, flag in (
        ("/is_sleeping", "--server-dev-mode"),
        ("/tokenizer_info", "--enable-tokenizer-info-endpoint"),
        ("/start_profile", "--profiler-config"),
    ):
        assert f"unless the server is started with {flag}." in get_now(APP, path).error()["message"]
    bare = make_house(saying("x"), ServerConfig(enable_docs=False)).app
    assert "this server answers" in get_now(bare, "/v1/nothing").error()["message"]
    answer = get_now(APP, CHAT)
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    assert "POST" in answer.error()["message"]
    assert ask_now(APP, "/health", {}).status == 405
    assert get_now(APP, "/v1/models/none").status == 404


def test_what_the_engine_refuses_is_no_stream() -> None:
    def refuse(request: Any) -> list[int]:
        raise InvalidRequestError("The request needs 9 KV blocks and there are 4.", param="messages", value=9)

    app = make_house(refuse).app
    for stream in (False, True):
        answer = ask_now(app, CHAT, HELLO | {"stream": stream})
        assert answer.status == 400
        assert "9 KV blocks" in answer.error()["message"]
    answer = ask_now(app, TEXT, {"prompt": ["a", "b"], "stream": True})
    assert answer.status == 400


def test_what_the_engine_fails_is_not_the_clients_fault() -> None:
    def fail(request: Any) -> list[int]:
        raise RuntimeError("secret internals")

    app = make_house(fail).app
    for stream in (False, True):
        answer = ask_now(app, CHAT, HELLO | {"stream": stream})
        assert answer.status == 500
        assert answer.error()["type"] == "InternalServerError"
        assert b"secret" not in answer.body


def test_an_unforeseen_error_is_logged_under_the_requests_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = make_house(saying("x"))

    def explode(*args: Any, **options: Any) -> None:
        raise RuntimeError("secret internals")

    monkeypatch.setattr(house.engine, "generate", explode)
    for stream in (False, True):
        answer = ask_now(house.app, CHAT, HELLO | {"stream": stream}, headers={"x-request-id": "find-me"})
        assert answer.status == 500
        assert "find-me" in answer.error()["message"]
        assert b"secret" not in answer.body
    assert "find-me" in caplog.text
    assert "secret internals" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_and_a_full_queue(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    house = make_house(saying("x"))
    house.engine.die("The engine core ran out of memory.")
    answer = ask_now(house.app, CHAT, HELLO | {"stream": stream})
    assert answer.status == 503
    assert answer.error()["type"] == "ServiceUnavailable"
    assert "ran out of memory" in answer.error()["message"]

    full = make_house(saying("x"))

    def refuse(*args: Any) -> None:
        raise QueueFullError("There is no room in the queue.", retry_after_s=7)

    monkeypatch.setattr(full.engine, "generate", refuse)
    answer = ask_now(full.app, CHAT, HELLO | {"stream": stream})
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"


def test_a_stream_that_fails_midway_ends_with_an_error_event() -> None:
    async def scenario() -> None:
        steps = asyncio.Semaphore(3)
        house = make_house(saying("abcdefgh"), pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO | {"stream": True})
        await visitor.heard.wait()
        house.engine.die("The engine core was killed.")
        answer = await visitor.whole()
        assert answer.status == 200
        events = answer.events()
        assert events[-1] == {
            "error": {
                "message": "The engine core was killed.",
                "type": "ServiceUnavailable",
                "param": None,
                "code": 503,
            }
        }
        assert events[1]["choices"][0]["delta"]["content"] == "a"

    asyncio.run(scenario())


def test_bad_requests_do_not_disturb_good_ones() -> None:
    async def scenario() -> None:
        house = make_house(saying("a good answer"), ServerConfig(max_n=8))
        good = [ask(house.app, CHAT, HELLO | {"stream": True}) for _ in range(10)]
        bad = [ask(house.app, CHAT, HELLO | change) for change, _ in BOTH[:30]]
        answers = await asyncio.gather(*good, *bad)
        for answer in answers[:10]:
            texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events()]
            assert "".join(texts) == "a good answer"
        assert all(answer.status == 400 for answer in answers[10:])
        assert not house.engine.running

    asyncio.run(scenario())
