"""`kv_transfer_params` of requests: what is understood, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from server_kit import ask_now, make_house, saying

from octavo.core.errors import InvalidRequestError
from octavo.core.info import ModelInfo
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.features.kv_transfer.offer import NAME, Ask, Fetch, Local, Option, Send, option_of
from octavo.features.kv_transfer.settings import TransferConfig, TransferInfo
from octavo.features.kv_transfer.text import TransferText
from octavo.text.hooks import TextContext

OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_ranks": [["127.0.0.1", 1]],
    "blocks": [[[0, 1]]],
    "last_block": "ab",
}


def text(role: Any = "kv_both", asks: tuple[str, ...] = (), **keys: Any) -> TransferText:
    facts = {} if role is None else {NAME: TransferInfo(TransferConfig(kv_role=role, **keys), asks)}
    encoded = {name: msgspec.Raw(msgspec.msgpack.encode(one)) for name, one in facts.items()}
    bare: dict[str, Any] = dict.fromkeys(ModelInfo.__struct_fields__)
    info = ModelInfo(**bare | {"feature_info": encoded, "features": list(encoded)})
    return TransferText(TextContext(tokenizer=None, info=info))  # type: ignore[arg-type]


def option(
    half: TransferText, given: Any = None, count: int = 300, stream: bool = False, **params: Any
) -> Option | None:
    body = SimpleNamespace(kv_transfer_params=given, stream=stream)
    asked = SamplingParams(**params, **half.params_of(body, max_bytes=1))
    found = half.option(asked, None, [1] * count)
    return None if found is None else option_of({NAME: found})


def test_what_requests_ask_for() -> None:
    half = text()
    assert option(half, {"do_remote_decode": True, "remote_host": None}) == Send()
    assert option(half, {"do_remote_prefill": False, "do_remote_decode": None}) == Local()
    fetch = option(half, OFFER | {"added_by_a_router": 1})
    assert isinstance(fetch, Fetch)
    assert fetch.offer.remote_ranks == [("127.0.0.1", 1)]
    assert option(half) is None
    assert option(half, {}) is None


def test_long_prompts_are_for_prefill_servers() -> None:
    half = text("kv_consumer", asks=("http://a",), min_tokens=256)
    assert option(half, count=256) == Ask()
    assert option(half, count=255) is None
    assert option(half, {"do_remote_prefill": False}) == Local()
    assert option(half, prompt_logprobs=1) is None
    assert option(half, skip_reading_prefix_cache=True) is None


@pytest.mark.parametrize(
    ("role", "given", "words", "param"),
    [
        (None, {"do_remote_decode": True}, "kv_producer", "kv_transfer_params"),
        ("kv_consumer", {"do_remote_decode": True}, "kv_producer", "kv_transfer_params"),
        ("kv_producer", OFFER, "kv_consumer", "kv_transfer_params"),
        ("kv_both", {"do_remote_decode": 1}, "must be true or false, got 1", "kv_transfer_params"),
        ("kv_both", {"do_remote_prefill": True, "do_remote_decode": True}, "set one of them", "kv_transfer_params"),
        ("kv_both", {"do_remote_prefill": True}, "Pass that on unchanged", "kv_transfer_params"),
        ("kv_both", OFFER | {"blocks": 3}, "Pass that on unchanged", "kv_transfer_params"),
        ("kv_both", OFFER | {"remote_ranks": [["192.0.2.1", 1]]}, "'192.0.2.1'.*Add it to peers", "kv_transfer_params"),
        ("kv_both", OFFER | {"remote_ranks": []}, "a host and a TCP port for each rank", "kv_transfer_params"),
        ("kv_both", OFFER | {"blocks": [[[0, 2], [1, 3]]]}, "must be rising ranges", "kv_transfer_params"),
        ("kv_both", OFFER | {"blocks": [[[0, 1 << 40]]]}, "must be rising ranges", "kv_transfer_params"),
        ("kv_both", OFFER | {"blocks": [[]] * 300}, "300 groups", "kv_transfer_params"),
        ("kv_both", OFFER | {"remote_ranks": [["127.0.0.1", 70000]]}, "a TCP port", "kv_transfer_params"),
        ("kv_both", "now", "must be an object", "kv_transfer_params"),
    ],
)
def test_what_can_not_be_done_is_named(role: Any, given: Any, words: str, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        option(text(role), given)
    assert caught.value.param == param


def test_a_stream_has_no_place_for_an_offer() -> None:
    with pytest.raises(InvalidRequestError, match="needs stream=false") as caught:
        option(text(), {"do_remote_decode": True}, stream=True)
    assert caught.value.param == "stream"
    assert isinstance(option(text(), OFFER, stream=True), Fetch)


@pytest.mark.parametrize(
    ("name", "value", "count"),
    [
        ("prompt", ["a", "b"], 2),
        ("prompt", [[1, 2], [3]], 2),
        ("prompt", [[1, 2]], 1),
        ("prompt", ["a"], 1),
        ("messages", [[{"role": "user"}], [{"role": "user"}]], 2),
        ("messages", [{"role": "user"}, {"role": "assistant"}], 1),
    ],
)
def test_parameters_are_of_one_prompt(name: str, value: Any, count: int) -> None:
    body = SimpleNamespace(kv_transfer_params=OFFER, **{name: value})
    if count == 1:
        assert text().params_of(body, max_bytes=1)
        return
    with pytest.raises(InvalidRequestError, match=f"the request has {count}") as caught:
        text().params_of(body, max_bytes=1)
    assert caught.value.param == "kv_transfer_params"


def test_beside_several_conversations_they_have_no_effect() -> None:
    """`/v1/chat/completions/batch` says so, and computes them."""
    facts = {NAME: msgspec.Raw(msgspec.msgpack.encode(TransferInfo(TransferConfig())))}
    house = make_house(saying("x"), features=[NAME], feature_info=facts)
    talk = [{"role": "user", "content": "a"}]
    body = {"kv_transfer_params": {"do_remote_decode": True}}
    answer = ask_now(house.app, "/v1/chat/completions/batch", {"messages": [talk, talk], **body}).json()
    (warning,) = answer["warnings"]
    assert "kv_transfer_params" in warning
    assert "Send a request for each conversation" in warning
    assert all(NAME not in request.options for request in house.engine.requests)
    assert "warnings" not in ask_now(house.app, "/v1/chat/completions", {"messages": talk, **body}).json()
    assert NAME in house.engine.requests[-1].options


def test_an_answer_has_the_offer() -> None:
    output = CompletionOutput(0, extra={"other": 1})
    text().answer(output, msgspec.msgpack.encode(OFFER))
    assert output.extra == {"other": 1, "kv_transfer_params": OFFER}


def test_the_start_says_who_computes() -> None:
    assert text(None).start_rows() == []
    assert text("kv_producer").start_rows() == [("KV blocks", "sends them to servers that ask for them")]
    both = text("kv_both", asks=("http://a", "http://b")).start_rows()
    assert both == [("KV blocks", "sends them to servers that ask for them and fetches them from http://a, http://b")]
    assert text("kv_consumer").start_rows() == [("KV blocks", "fetches them from servers that requests name")]
