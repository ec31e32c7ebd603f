"""Token ids in, token ids out; requests rendered for another engine; the tokenizer told."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec
import pytest
from server_kit import HELLO, TEMPLATE, TOKENIZER, VOCAB_SIZE, House, ask_now, get_now, ids, make_house, saying

from octavo.config import ServerConfig
from octavo.core.pausing import PauseMode, SleepTag

GENERATE = "/inference/v1/generate"
ASKED: dict[str, Any] = {"token_ids": ids("abc")}
HEARD = [*ids("hi"), 2]


@pytest.fixture
def house() -> House:
    return make_house(saying("hi"))


def sampling(**fields: Any) -> dict[str, Any]:
    return ASKED | {"sampling_params": fields}


def test_tokens_for_tokens(house: House) -> None:
    made = ask_now(house.app, GENERATE, ASKED | {"request_id": "r1", "model": "toy"}).json()
    assert made["request_id"] == "r1"
    (choice,) = made["choices"]
    assert choice == {"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": HEARD}
    assert made["usage"]["completion_tokens"] == len(HEARD)
    (request,) = house.engine.requests
    assert request.tokens == ids("abc")
    assert request.params.max_tokens == house.engine.info.max_model_len - 3
    assert not request.params.detokenize


def test_parameters_are_taken_to_the_letter(house: House) -> None:
    fields = {"temperature": 0.5, "max_tokens": 7, "stop_token_ids": [5], "extra_args": None, "output_kind": 2}
    assert ask_now(house.app, GENERATE, sampling(**fields, skip_reading_prefix_cache=True)).status == 200
    request = house.engine.requests[-1]
    params = request.params
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (0.5, 7, [5])
    assert not request.reads_cache


def test_a_stop_string_is_looked_for_in_the_text(house: House) -> None:
    (choice,) = ask_now(house.app, GENERATE, sampling(stop=["i"])).json()["choices"]
    assert choice["token_ids"] == ids("hi")
    assert ask_now(house.app, GENERATE, sampling(stop=["i"], detokenize=False)).status == 400


@pytest.mark.parametrize("count", [0, 1, 3])
def test_log_probabilities_name_tokens_by_id(house: House, count: int) -> None:
    (choice,) = ask_now(house.app, GENERATE, sampling(logprobs=count, n=1)).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in HEARD]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {max(count, 1)}


def test_streamed_they_are_the_same(house: House) -> None:
    body = sampling(n=2, logprobs=1) | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask_now(house.app, GENERATE, body).events()
    told: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert choice["token_ids"]
        assert chunk["usage"] is None
        told[choice["index"]] += choice["token_ids"]
    assert told == {0: HEARD, 1: HEARD}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * len(HEARD)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, "token_ids"),
        (sampling(temperature=-1), "temperature"),
        (sampling(max_tokens="7"), "max_tokens"),
        (sampling(flat_logprobs=True), "flat_logprobs"),
        (sampling(beam_width=2), "beam_width"),
        (sampling(skip_reading_prefix_cache=3), "sampling_params.skip_reading_prefix_cache"),
        (ASKED | {"max_tokens": 5}, "max_tokens"),
        (ASKED | {"prompt": "abc"}, "prompt"),
        (ASKED | {"features": {"mm_hashes": {}}}, "features"),
        (ASKED | {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_what_is_refused(house: House, body: dict[str, Any], param: str) -> None:
    answer = ask_now(house.app, GENERATE, body)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert not house.engine.requests


def test_fields_that_are_none_of_sampling_are_named(house: House) -> None:
    made = ask_now(house.app, GENERATE, sampling(echo=True, flat_logprobs=False)).json()
    assert made["warnings"] == ["The unknown field `sampling_params.echo` was ignored."]
    strict = make_house(saying("hi"), ServerConfig(strict_params=True))
    assert ask_now(strict.app, GENERATE, sampling(echo=True)).status == 400


@pytest.mark.features("grammar")
def test_a_rendered_chat_computes_as_the_chat_would() -> None:
    house = make_house(saying("hi"), features=["grammar"])
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    asked = HELLO | {
        "temperature": 0.125,
        "stop": ["x"],
        "seed": 3,
        "response_format": form,
        "logprobs": True,
        "top_logprobs": 2,
        "cache_salt": "s",
    }
    rendered = ask_now(house.app, "/v1/chat/completions/render", asked).json()
    assert not house.engine.requests
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["token_ids"] == ids("[user]Hello\n[assistant]")
    assert rendered["sampling_params"]["temperature"] == 0.125
    assert rendered["model"] == "toy"
    assert ask_now(house.app, GENERATE, rendered).status == 200
    assert ask_now(house.app, "/v1/chat/completions", asked).status == 200
    one, other = house.engine.requests
    assert one.params == other.params
    assert (one.tokens, one.namespace) == (other.tokens, other.namespace)
    forms = [msgspec.msgpack.decode(request.options["grammar"]) for request in (one, other)]
    assert [form.pop("param", None) for form in forms] == [None, "response_format"]
    assert forms[0] == forms[1]


@pytest.mark.features("grammar")
def test_a_rendered_chat_keeps_the_schemas_of_its_tools() -> None:
    house = make_house(saying("hi"), features=["grammar"])
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
    asked = HELLO | {"tools": [{"type": "function", "function": function}]}
    rendered = ask_now(house.app, "/v1/chat/completions/render", asked).json()
    assert ask_now(house.app, GENERATE, rendered).status == 200
    assert ask_now(house.app, "/v1/chat/completions", asked).status == 200
    forms = [msgspec.msgpack.decode(request.options["grammar"]) for request in house.engine.requests]
    assert forms[0]["parts"] == forms[1]["parts"]
    assert [(part["name"], part["strict"]) for part in forms[0]["parts"]] == [("json_0", True)]


def test_a_rendered_stream_is_still_one(house: House) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask_now(
        house.app, "/v1/chat/completions/render", HELLO | {"stream": True, "stream_options": options}
    ).json()
    assert (answer["stream"], answer["stream_options"]) == (True, options)


def test_each_prompt_is_rendered(house: House) -> None:
    one, two = ask_now(house.app, "/v1/completions/render", {"prompt": ["a", "bc"], "max_tokens": 16}).json()
    assert (one["token_ids"], two["token_ids"]) == (ids("a"), ids("bc"))
    assert one["sampling_params"]["max_tokens"] == 16
    assert one["request_id"] != two["request_id"]
    assert one["request_id"].startswith("cmpl-")


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({}, None),
        ({"return_token_offsets": True}, [(n, n + 1) for n in range(5)]),
        ({"return_token_offsets": True, "truncate_prompt_tokens": 2}, [(3, 4), (4, 5)]),
        ({"return_token_offsets": True, "truncate_prompt_tokens": 2, "truncation_side": "right"}, [(0, 1), (1, 2)]),
        ({"return_token_offsets": True, "prompt": [5, 6]}, None),
    ],
)
def test_what_is_rendered_tells_where_its_tokens_stand(house: House, fields: dict[str, Any], offsets: Any) -> None:
    (one,) = ask_now(house.app, "/v1/completions/render", {"prompt": "hello"} | fields).json()
    assert one["token_offsets"] == (None if offsets is None else [list(pair) for pair in offsets])


def test_offsets_of_a_chat_are_those_in_its_template(house: House) -> None:
    chat = ask_now(house.app, "/v1/chat/completions/render", HELLO | {"return_token_offsets": True}).json()
    assert [start for start, _ in chat["token_offsets"]] == list(range(len("[user]Hello\n[assistant]")))


def test_messages_are_rendered(house: House) -> None:
    asked = HELLO | {"max_tokens": 4, "system": "Be."}
    rendered = ask_now(house.app, "/v1/messages/render", asked).json()
    assert rendered["token_ids"] == ids("[system]Be.\n[user]Hello\n[assistant]")
    assert rendered["sampling_params"]["max_tokens"] == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions/render", HELLO), ("/v1/completions/render", {"prompt": "a"}), (GENERATE, ASKED)],
)
def test_an_unknown_model_is_not_found(house: House, path: str, body: dict[str, Any]) -> None:
    assert ask_now(house.app, path, body | {"model": "other"}).status == 404


SCORED: dict[str, Any] = {"query": "Is it? ", "items": ["ab", "c"], "label_token_ids": ids("hx")}


@pytest.mark.parametrize(("softmax", "score"), [(True, 1 / (1 + math.exp(-2))), (False, math.exp(-0.5))])
def test_items_are_scored_by_the_token_that_follows(house: House, softmax: bool, score: float) -> None:
    made = ask_now(house.app, "/generative_scoring", SCORED | {"apply_softmax": softmax}).json()
    assert made["id"].startswith("generative-scoring-")
    assert [(one["object"], one["index"]) for one in made["data"]] == [("score", 0), ("score", 1)]
    assert [one["score"] for one in made["data"]] == pytest.approx([score, score])
    assert made["usage"]["completion_tokens"] == 2
    assert [request.tokens for request in house.engine.requests] == [ids("Is it? ab"), ids("Is it? c")]
    tokens = {"query": ids("q"), "items": [ids("ab")], "item_first": True}
    assert ask_now(house.app, "/generative_scoring", SCORED | tokens).status == 200
    assert house.engine.requests[-1].tokens == ids("abq")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**9]}, "label_token_ids"),
        ({"label_token_ids": list(range(129))}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[5], [10**9]]}, "items.1"),
        ({"items": 5}, "items"),
        ({"query": None}, "query"),
        ({"request_id": "a\nINFO Request b ended"}, "request_id"),
    ],
)
def test_what_can_not_be_scored(house: House, fields: dict[str, Any], param: str) -> None:
    answer = ask_now(house.app, "/generative_scoring", SCORED | fields)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert param.split(".")[0] in answer.error()["message"]


def test_a_load_balancer_is_told_of_the_load(house: House) -> None:
    house.engine.current.num_waiting = 3
    asked = {"endpoint-load-metrics-format": "text"}
    told = ask_now(house.app, GENERATE, ASKED, headers=asked).headers["endpoint-load-metrics"]
    assert told == "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=3"
    asked = {"endpoint-load-metrics-format": "JSON"}
    told = ask_now(house.app, GENERATE, ASKED | {"stream": True}, headers=asked).headers["endpoint-load-metrics"]
    assert json.loads(told.removeprefix("JSON "))["named_metrics"]["num_requests_waiting"] == 3
    for headers in ({}, {"endpoint-load-metrics-format": "yaml"}):
        assert "endpoint-load-metrics" not in ask_now(house.app, GENERATE, ASKED, headers=headers).headers


def test_any_name_will_do_where_names_are_not_looked_at() -> None:
    lenient = make_house(saying("hi"), ServerConfig(skip_model_name_validation=True))
    answer = ask_now(lenient.app, "/v1/chat/completions", HELLO | {"model": "gpt-9"})
    assert (answer.status, answer.json()["model"]) == (200, "gpt-9")


def test_the_tokenizer_is_told_where_that_is_wanted(house: House) -> None:
    assert get_now(house.app, "/tokenizer_info").status == 404
    open_ = make_house(saying("hi"), ServerConfig(enable_tokenizer_info_endpoint=True))
    told = get_now(open_.app, "/tokenizer_info").json()
    assert told["chat_template"] == TEMPLATE
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    assert told["additional_special_tokens"] == ["<unk>"]
    assert told["added_tokens_decoder"]["2"]["content"] == "</s>"
    assert told["added_tokens_decoder"]["2"]["special"] is True
    assert told["vocab_size"] == TOKENIZER.vocab_size
    assert told["tokenizer_class"]


def test_routes_for_development_are_there_only_then(house: House) -> None:
    paths = {"/server_info": "GET", "/is_sleeping": "GET", "/reset_prefix_cache": "POST", "/sleep": "POST"}
    assert {ask_now(house.app, path, method=method).status for path, method in paths.items()} == {404}
    secret = ServerConfig(server_dev_mode=True, api_keys=("k3y",))
    dev = make_house(saying("hi"), secret, feature_info={"toy": msgspec.Raw(msgspec.msgpack.encode([7]))})
    key = {"authorization": "Bearer k3y"}
    assert get_now(dev.app, "/server_info").status == 401
    told = get_now(dev.app, "/server_info?config_format=json", headers=key)
    assert told.json()["vllm_config"]["server"]["port"] == 8000
    assert told.json()["vllm_config"]["model"]["feature_info"] == {"toy": [7]}
    assert b"k3y" not in told.body + get_now(dev.app, "/server_info", headers=key).body
    assert isinstance(get_now(dev.app, "/server_info", headers=key).json()["vllm_config"], str)
    assert get_now(dev.app, "/server_info?config_format=xml", headers=key).status == 400
    assert ask_now(dev.app, "/reset_prefix_cache", headers=key).status == 200
    assert dev.engine.resets == 1


def test_profiles_are_made_where_there_is_a_folder_for_them(house: House) -> None:
    assert ask_now(house.app, "/start_profile").status == ask_now(house.app, "/stop_profile").status == 404
    open_ = make_house(saying("hi"), profile_dir="/profiles")
    assert ask_now(open_.app, "/start_profile?profile_prefix=run-1").json() == {"status": "started"}
    assert ask_now(open_.app, "/stop_profile").json() == {"status": "stopped", "trace": "/profiles/fake.json"}
    assert open_.engine.commands == [("start_profile", "run-1"), ("stop_profile",)]
    locked = make_house(saying("hi"), ServerConfig(api_keys=("k3y",)), profile_dir="/profiles")
    assert ask_now(locked.app, "/start_profile").status == 401


def test_the_engine_is_paused_and_put_to_sleep_by_routes() -> None:
    dev = make_house(saying("hi"), ServerConfig(server_dev_mode=True))

    def tell(path: str) -> Any:
        answer = ask_now(dev.app, path)
        assert answer.status == 200, answer.body
        return answer.json() if answer.body else None

    assert get_now(dev.app, "/is_paused").json() == {"is_paused": False}
    assert tell("/pause") == {"status": "paused"}
    assert get_now(dev.app, "/is_paused").json() == {"is_paused": True}
    assert tell("/resume") == {"status": "resumed"}
    tell("/pause?mode=keep&clear_cache=False")
    tell("/pause?wait_for_inflight_requests=true")
    for query, param in (("mode=never", "mode"), ("clear_cache=perhaps", "clear_cache")):
        refused = ask_now(dev.app, f"/pause?{query}")
        assert (refused.status, refused.error()["param"]) == (400, f"query.{param}")
    assert get_now(dev.app, "/is_sleeping").json() == {"is_sleeping": False}
    tell("/sleep")
    assert get_now(dev.app, "/is_sleeping").json() == {"is_sleeping": True}
    state = re.findall(
        r'vllm:engine_sleep_state{.*sleep_state="(\w+)"} (\d)', get_now(dev.app, "/metrics").body.decode()
    )
    assert dict(state) == {"awake": "0", "weights_offloaded": "1", "discard_all": "0"}
    tell("/sleep?level=2&mode=wait")
    tell("/wake_up?tags=weights&tags=kv_cache")
    tell("/wake_up")
    for path, param in (("/sleep?level=3", "level"), ("/sleep?level=-1", "level"), ("/wake_up?tags=all", "tags")):
        refused = ask_now(dev.app, path)
        assert (refused.status, refused.error()["param"]) == (400, f"query.{param}")
    assert dev.engine.commands == [
        ("pause", PauseMode.ABORT, True),
        ("resume",),
        ("pause", PauseMode.KEEP, False),
        ("pause", PauseMode.WAIT, True),
        ("sleep", 1, PauseMode.ABORT),
        ("sleep", 2, PauseMode.WAIT),
        ("wake_up", SleepTag.WEIGHTS, SleepTag.KV_CACHE),
        ("wake_up", *SleepTag),
    ]
    assert tell("/abort_requests") == {"status": "aborted", "aborted": 0}
    assert ask_now(dev.app, "/abort_requests", {"request_ids": ["a"]}).json()["aborted"] == 0
    assert ask_now(dev.app, "/abort_requests", {"request_ids": "a"}).error()["param"] == "request_ids"
