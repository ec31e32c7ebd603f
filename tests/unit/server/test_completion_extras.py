"""Text completions: the prompt echoed, its log-probabilities, the best of several."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, TOKENIZER, ask_now, ids, make_house, saying

from octavo.core.output import CompletionOutput, Logprob
from octavo.core.params import SamplingParams
from octavo.server.openai.logprobs import LogprobWriter

PATH = "/v1/completions"
ASKED = {"prompt": "Hi, ", "temperature": 1}


def joined(events: list[Any]) -> str:
    return "".join(choice["text"] for one in events for choice in one["choices"])


@pytest.mark.parametrize("prompt", ["Hi, ", ids("Hi, ")], ids=["text", "tokens"])
def test_echo_puts_the_prompt_first(prompt: Any) -> None:
    app = make_house(saying("there")).app
    body = ASKED | {"prompt": prompt, "echo": True}
    assert ask_now(app, PATH, body).json()["choices"][0]["text"] == "Hi, there"
    assert joined(ask_now(app, PATH, body | {"stream": True}).events()) == "Hi, there"
    several = ask_now(app, PATH, body | {"prompt": ["a", "b"], "n": 2}).json()["choices"]
    assert [choice["text"] for choice in several] == ["athere", "athere", "bthere", "bthere"]


def test_offsets_are_places_in_an_echo_of_special_tokens() -> None:
    app = make_house(saying("you")).app
    (choice,) = ask_now(app, PATH, ASKED | {"prompt": [1, *ids("Hi"), 2], "echo": True, "logprobs": 1}).json()[
        "choices"
    ]
    assert choice["text"] == "<s>Hi</s>you"
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"][:7], logprobs["text_offset"], strict=False):
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(stream: bool) -> None:
    app = make_house(saying("you")).app
    answer = ask_now(app, PATH, ASKED | {"echo": True, "logprobs": 1, "stream": stream, "max_tokens": 3})
    parts = [c["logprobs"] for e in answer.events() for c in e["choices"]] if stream else None
    whole = parts or [answer.json()["choices"][0]["logprobs"]]
    logprobs = {name: [x for part in whole for x in part[name]] for name in whole[0]}
    assert "".join(logprobs["tokens"]) == "Hi, you"
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 6
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"i": -0.5}


def test_the_chosen_token_comes_before_the_likely_ones() -> None:
    (likely, second, chosen) = ids("abc")
    entries = {likely: Logprob(-0.1, 1, "a"), second: Logprob(-1.0, 2, "b"), chosen: Logprob(-9.0, 30, "c")}
    writer = LogprobWriter(TOKENIZER, SamplingParams(logprobs=2), as_ids=False)
    output = CompletionOutput(0, "c", [chosen], logprobs=[entries])
    told = writer.completion(output, 0)
    assert told is not None
    assert [list(top or ()) for top in told.top_logprobs] == [["c", "a", "b"]]
    every = LogprobWriter(TOKENIZER, SamplingParams(logprobs=-1), as_ids=False).chat(output)
    assert every is not None
    assert [top.token for top in every.content[0].top_logprobs] == ["a", "b", "c"]


def test_prompt_logprobs_in_both_apis() -> None:
    app = make_house(saying("x")).app
    text = ask_now(app, PATH, ASKED | {"prompt_logprobs": 2}).json()["choices"][0]["prompt_logprobs"]
    assert text[0] is None
    assert len(text) == 4
    (i, *_) = ids("i")
    assert text[1][str(i)] == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}
    chat = ask_now(app, "/v1/chat/completions", HELLO | {"prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert ask_now(app, "/v1/chat/completions", HELLO).json()["prompt_logprobs"] is None
    streamed = ask_now(app, PATH, ASKED | {"prompt_logprobs": 2, "stream": True})
    assert streamed.error()["param"] == "prompt_logprobs"


def test_the_best_of_several_come_best_first() -> None:
    house = make_house(saying("one", "second", "three", "4"))
    body = ASKED | {"best_of": 4, "n": 2}
    answer = ask_now(house.app, PATH, body).json()
    assert house.engine.requests[0].params.n == 4
    # Each token costs the same, so the shorter text is the likelier.
    assert [choice["text"] for choice in answer["choices"]] == ["4", "one"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == len("onesecondthree4") + 4


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 100}, {"best_of": 2, "temperature": 0}],
)
def test_a_wrong_best_of_is_refused(fields: dict[str, Any]) -> None:
    answer = ask_now(make_house(saying("x")).app, PATH, ASKED | fields)
    assert answer.status == 400
    assert answer.error()["param"] in ("best_of", "n")


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": -1}, {"n": -1, "best_of": 3}])
def test_too_small_an_n_is_told_as_it_was_sent(fields: dict[str, Any]) -> None:
    answer = ask_now(make_house(saying("x")).app, PATH, ASKED | fields)
    assert answer.status == 400
    assert f"n must be at least 1, got {fields['n']}." in answer.error()["message"]


def test_bad_words_become_tokens_with_and_without_a_space() -> None:
    house = make_house(saying("x"))
    ask_now(house.app, PATH, ASKED | {"bad_words": ["no", "é"]})
    params = house.engine.requests[0].params
    assert params.bad_token_ids is not None
    assert [TOKENIZER.decode(word) for word in params.bad_token_ids] == ["no", " no", "é", " é"]


def test_limits_and_rules_reach_the_engine() -> None:
    house = make_house(saying("x"))
    fields = {"allowed_token_ids": [5, 6], "repetition_detection": {"max_pattern_size": 4, "min_count": 2}}
    assert ask_now(house.app, PATH, ASKED | fields).status == 200
    params = house.engine.requests[0].params
    assert params.allowed_token_ids == [5, 6]
    rule = params.repetition_detection
    assert rule is not None
    assert (rule.min_pattern_size, rule.max_pattern_size, rule.min_count) == (1, 4, 2)


@pytest.mark.parametrize(("limit", "asked", "status"), [(5, 6, 400), (5, 5, 200), (-1, 200, 200), (-1, -1, 200)])
def test_the_limit_of_logprobs_is_the_servers(limit: int, asked: int, status: int) -> None:
    app = make_house(saying("x"), max_logprobs=limit).app
    answer = ask_now(app, PATH, ASKED | {"logprobs": asked})
    assert answer.status == status
    if status == 400:
        message = "Requested sample logprobs of 6, which is greater than max allowed: 5"
        assert answer.error()["message"].startswith(message)
        assert "larger --max-logprobs. (parameter=logprobs, value=6)" in answer.error()["message"]
