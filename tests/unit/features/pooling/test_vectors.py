"""The routes of vectors, labels and scores, on an engine that plays vectors."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from typing import Any

import msgspec
import numpy as np
import pytest
from pooler_kit import told
from server_kit import TEMPLATE, TOKENIZER, VOCAB_SIZE, Answer, Visitor, ask_now, eventually, get_now

from octavo.config import ServerConfig
from octavo.core.request import BACKGROUND, GenerateRequest
from octavo.engine.fake import FakeEngine, fake_info
from octavo.features.pooling.params import Pooled, PoolerInfo, PoolingSpec
from octavo.features.pooling.payload import NAME as OPTION
from octavo.server.app import background_executor, create_app, make_context
from octavo.server.batch.lines import Line
from octavo.text.chat.template import ChatTemplate
from octavo.text.frontend import Frontend

POOLER = PoolerInfo(pooling="mean", normalize=True, size=3, matryoshka=[2])


def play(request: GenerateRequest) -> dict[str, bytes]:
    """How many "a", "b" and other tokens there are; a vector for each token, or the number of tokens as a label."""
    params = msgspec.msgpack.decode(request.options[OPTION], type=PoolingSpec)
    letters = [TOKENIZER.token_text(token) for token in request.tokens]
    counts = [float(letters.count("a")), float(letters.count("b")), float(len(letters))]
    if params.task == "classify":
        rows = [[float(len(letters)), 1.0]]
    elif params.task == "token_embed":
        rows = [[float(token), 0.0, 1.0] for token in request.tokens]
    else:
        rows = [counts[: params.dimensions]]
    shape = [len(rows), len(rows[0])] if params.task == "token_embed" else [len(rows[0])]
    data = array("f", [value for row in rows for value in row]).tobytes()
    return {OPTION: msgspec.msgpack.encode(Pooled(shape, data))}


def house(
    config: ServerConfig | None = None, pace: Any = None, *, templated: bool = False, **info: Any
) -> tuple[Any, FakeEngine]:
    pooler = info.pop("pooler", POOLER)
    tasks = ["embed", "token_embed", *(["classify"] if pooler and pooler.labels else [])]
    settings = {"tasks": tasks, "feature_info": told(pooler), "num_blocks": 0, **info}
    engine = FakeEngine(
        lambda request: [], info=fake_info(name="toy", vocab_size=VOCAB_SIZE, **settings), found=play, pace=pace
    )
    chat = ChatTemplate(TEMPLATE, TOKENIZER) if templated else None
    return create_app(Frontend(engine, TOKENIZER, engine.info, chat=chat), config), engine


def post(path: str, body: dict[str, Any], app: Any = None, **info: Any) -> Answer:
    return ask_now(app or house(**info)[0], path, body)


def test_embeddings_come_in_the_order_of_their_inputs() -> None:
    app, engine = house()
    body = post("/v1/embeddings", {"model": "toy", "input": ["aab", "b"], "user": "me"}, app).json()
    assert body["object"] == "list"
    assert body["id"].startswith("embd-")
    assert body["model"] == "toy"
    assert body["data"] == [
        {"object": "embedding", "index": 0, "embedding": [2.0, 1.0, 3.0]},
        {"object": "embedding", "index": 1, "embedding": [0.0, 1.0, 1.0]},
    ]
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert all(request.prompt_only for request in engine.requests)
    assert "warnings" not in body


@pytest.mark.parametrize("given", ["ab", ["ab"], [TOKENIZER.encode("ab")], TOKENIZER.encode("ab")])
def test_an_input_has_four_forms(given: Any) -> None:
    assert post("/v1/embeddings", {"input": given}).json()["data"][0]["embedding"] == [1.0, 1.0, 2.0]


def test_base64_holds_the_same_numbers() -> None:
    body = post("/v1/embeddings", {"input": "aab", "encoding_format": "base64", "dimensions": 2}).json()
    assert array("f", base64.b64decode(body["data"][0]["embedding"])).tolist() == [2.0, 1.0]


def test_bytes_come_with_their_places_in_a_header_or_alone() -> None:
    asked = {"input": ["aab", "b"], "embed_dtype": "float16", "endianness": "big"}
    answer = post("/v1/embeddings", asked | {"encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    told = json.loads(answer.headers["metadata"])
    assert [(one["start"], one["end"], one["shape"]) for one in told["data"]] == [(0, 6, [3]), (6, 12, [3])]
    assert {(one["embed_dtype"], one["endianness"]) for one in told["data"]} == {("float16", "big")}
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert np.frombuffer(answer.body, dtype=">f2").tolist() == [2.0, 1.0, 3.0, 0.0, 1.0, 1.0]
    alone = post("/pooling", asked | {"encoding_format": "bytes_only", "task": "embed"})
    assert "metadata" not in alone.headers
    assert alone.body == answer.body
    text = post("/v1/embeddings", asked | {"encoding_format": "base64"}).json()["data"][1]["embedding"]
    assert base64.b64decode(text) == answer.body[6:]


def test_a_conversation_is_written_by_the_template() -> None:
    app, engine = house(templated=True)
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    written = "[user]a\n[assistant]b\n"
    for more, text in (
        ({}, written),
        ({"add_generation_prompt": True}, written + "[assistant]"),
        ({"continue_final_message": True}, "[user]a\n[assistant]b"),
    ):
        assert len(post("/v1/embeddings", talk | more, app).json()["data"]) == 1
        assert engine.requests[-1].tokens == TOKENIZER.encode(text, add_special_tokens=False)
    assert post("/pooling", talk, app).status == 200
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert "Cannot set both" in post("/v1/embeddings", talk | both, app).error()["message"]


def test_coheres_clients_get_their_forms() -> None:
    app, engine = house()
    asked = {"model": "toy", "texts": ["aab", "b"], "input_type": "search_query"}
    forms = ["float", "base64", "binary", "ubinary"]
    body = post("/v2/embed", asked | {"embedding_types": forms}, app).json()
    made = body["embeddings"]
    assert made["float"] == [[2.0, 1.0, 3.0], [0.0, 1.0, 1.0]]
    assert array("f", base64.b64decode(made["base64"][0])).tolist() == [2.0, 1.0, 3.0]
    assert made["ubinary"] == [[0b11100000], [0b01100000]]
    assert made["binary"] == [[0b11100000 - 128], [0b01100000 - 128]]
    assert body["texts"] == ["aab", "b"]
    assert body["meta"]["api_version"]["version"] == "2"
    assert body["meta"]["tokens"]["input_tokens"] == 4
    assert list(post("/v2/embed", {"texts": ["a"], "output_dimension": 2}, app).json()["embeddings"]) == ["float"]
    long = {"texts": ["ab" * 3000], "max_tokens": 5}
    for side, kept in (("START", "babab"), ("END", "ababa")):
        assert post("/v2/embed", long | {"truncate": side}, app).status == 200
        assert engine.requests[-1].tokens == TOKENIZER.encode(kept)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"texts": None}, "texts"),
        ({"texts": []}, "texts"),
        ({"input_type": "poem"}, "Unsupported input_type"),
        ({"embedding_types": ["int8"]}, "embedding_types"),
        ({"texts": ["ab" * 3000], "truncate": "NONE"}, "maximum context length"),
    ],
)
def test_what_coheres_clients_may_not_ask(fields: dict[str, Any], words: str) -> None:
    answer = post("/v2/embed", {"texts": ["a"]} | fields)
    assert answer.status == 400
    assert words in answer.error()["message"]


def test_an_unknown_task_is_refused() -> None:
    message = post("/pooling", {"input": "a", "task": "plugin"}).error()["message"]
    assert message.startswith("Unsupported task: 'plugin'")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 3]}, "input"),
        ({"input": "a", "encoding_format": "binary"}, "encoding_format"),
        ({"input": "a", "endianness": "middle"}, "endianness"),
        ({"input": "a", "dimensions": 1}, "dimensions"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a" * 2000}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"input": ["a"] * 2049}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    answer = post("/v1/embeddings", fields)
    assert answer.status == 400
    assert answer.error()["param"] == param


def test_fields_that_nobody_knows_are_told_of_or_refused() -> None:
    assert post("/v1/embeddings", {"input": "a", "foo": 1}).json()["warnings"] == [
        "The unknown field `foo` was ignored."
    ]
    strict = house(ServerConfig(strict_params=True))[0]
    assert post("/v1/embeddings", {"input": "a", "foo": 1}, strict).error()["param"] == "foo"


def test_an_unknown_model_is_not_found() -> None:
    assert post("/v1/embeddings", {"model": "other", "input": "a"}).status == 404


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_best_first(path: str) -> None:
    documents = ["bbbb", {"text": "aa"}, "ab"]
    body = post(path, {"query": "aa", "documents": documents, "top_n": 2}).json()
    assert [(one["index"], one["document"]["text"]) for one in body["results"]] == [(1, "aa"), (2, "ab")]
    assert body["results"][0]["relevance_score"] == pytest.approx(1)
    assert body["usage"]["total_tokens"] == 2 + 4 + 2
    assert body["meta"]["api_version"] == {"version": "2"}


def test_documents_may_stay_away_from_the_answer() -> None:
    body = post("/rerank", {"query": "a", "documents": ["b", "a"], "return_documents": False}).json()
    assert [one["index"] for one in body["results"]] == [1, 0]
    assert all("document" not in one for one in body["results"])


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_of_pairs(names: tuple[str, str]) -> None:
    body = post("/v1/score", {names[0]: "a", names[1]: ["a", "b"]}).json()
    assert [one["index"] for one in body["data"]] == [0, 1]
    assert body["data"][0]["score"] == pytest.approx(1)
    assert body["data"][1]["score"] == pytest.approx(0.5)


def test_a_cross_encoder_scores_by_its_head() -> None:
    head = PoolerInfo(pooling="cls", normalize=True, size=3, labels=["relevant"], activation="none")
    app, engine = house(pooler=head)
    body = post("/score", {"text_1": "ab", "text_2": ["a", "bbb"]}, app).json()
    assert [one["score"] for one in body["data"]] == [3.0, 5.0]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("path", ["/score", "/rerank"])
@pytest.mark.parametrize(("asked", "activation"), [({}, "sigmoid"), ({"use_activation": False}, "none")])
def test_a_cross_encoders_bare_outputs_can_be_had(path: str, asked: dict[str, Any], activation: str) -> None:
    head = PoolerInfo(pooling="cls", normalize=True, size=3, labels=["relevant"], activation="sigmoid")
    app, engine = house(pooler=head)
    pairs = {"query": "a", "queries": "a", "documents": ["b"]}
    assert post(path, pairs | asked, app).status == 200
    (request,) = engine.requests
    assert msgspec.msgpack.decode(request.options[OPTION], type=PoolingSpec).activation == activation


@pytest.mark.parametrize(("limit", "read"), [(None, 5), (0, 5), (2, 2), (9, 5)])
def test_documents_alone_are_cut_for_a_ranking(limit: int | None, read: int) -> None:
    app, engine = house()
    asked = {"query": "aaaa", "documents": ["abbbb"], "max_tokens_per_doc": limit}
    body = post("/rerank", asked, app).json()
    assert sorted(len(request.tokens) for request in engine.requests) == sorted([4, read])
    assert body["results"][0]["document"] == {"text": "abbbb"}


def test_one_route_for_all_that_vectors_serve() -> None:
    head = PoolerInfo(pooling="cls", normalize=True, size=3, labels=["long", "short"], activation="softmax")
    assert "label" in post("/invocations", {"input": "a"}, pooler=head).json()["data"][0]
    assert "embedding" in post("/invocations", {"input": "a"}).json()["data"][0]
    assert "score" in post("/invocations", {"queries": "a", "items": "b"}).json()["data"][0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/score", {}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": 3}, "text_2"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"txt": "a"}]}, "documents.0"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_what_is_wrong_with_pairs_is_named(path: str, fields: dict[str, Any], param: str) -> None:
    answer = post(path, fields)
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert param in answer.error()["message"]


def test_labels_bear_their_names() -> None:
    head = PoolerInfo(pooling="cls", normalize=True, size=3, labels=["long", "short"], activation="softmax")
    body = post("/classify", {"input": ["aaa"]}, pooler=head).json()
    assert body["data"] == [{"index": 0, "label": "long", "probs": [3.0, 1.0], "num_classes": 2}]


def test_pooling_gives_a_vector_for_each_token() -> None:
    tokens = TOKENIZER.encode("ab")
    rows = [[float(token), 0.0, 1.0] for token in tokens]
    assert post("/pooling", {"input": "ab", "task": "token_embed"}).json()["data"][0]["data"] == rows
    as_told = PoolerInfo(pooling="mean", normalize=True, size=3, task="token_embed")
    assert post("/pooling", {"input": "ab"}, pooler=as_told).json()["data"][0]["data"] == rows


def test_pooling_does_what_the_model_is_there_for() -> None:
    body = post("/pooling", {"input": "ab", "request_id": "mine"}).json()
    assert (body["id"], body["data"][0]["data"]) == ("pooling-mine", [1.0, 1.0, 2.0])
    head = PoolerInfo(pooling="cls", normalize=True, size=3, labels=["long", "short"], task="classify")
    assert post("/pooling", {"input": "abc"}, pooler=head).json()["data"][0]["data"] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_text_of_a_model_that_makes_vectors_is_refused_with_the_remedy(path: str, body: dict[str, Any]) -> None:
    answer = post(path, body)
    assert answer.status == 400
    assert "/v1/embeddings" in answer.error()["message"]


def test_vectors_of_a_model_that_makes_none_are_refused_with_the_remedy() -> None:
    answer = post("/v1/embeddings", {"input": "a"}, tasks=["generate"], pooler=None)
    assert answer.status == 400
    assert "--runner pooling" in answer.error()["message"]


def test_the_card_says_what_the_model_is_for() -> None:
    app, _ = house()
    assert get_now(app, "/v1/models").json()["data"][0]["tasks"] == ["embed", "token_embed"]
    assert "/v1/embeddings" in get_now(app, "/").json()["try"]
    metrics = get_now(app, "/metrics").body.decode()
    assert "generation_tokens_total" in metrics


def test_a_client_that_leaves_takes_its_requests_along() -> None:
    async def scene() -> None:
        gate = asyncio.Event()
        app, engine = house(pace=gate.wait)
        visitor = Visitor(app, "/v1/embeddings", {"input": ["a", "b", "ab"]})
        await eventually(lambda: len(engine.running) == 3)
        visitor.leaves.set()
        await visitor.whole()
        assert len(engine.abandoned) == 3
        assert not engine.running

    asyncio.run(scene())


def test_a_vector_that_the_engine_aborts_can_be_asked_for_again() -> None:
    async def scene() -> None:
        gate = asyncio.Event()
        app, engine = house(pace=gate.wait)
        visitor = Visitor(app, "/v1/embeddings", {"input": "a"})
        await eventually(lambda: len(engine.running) == 1)
        await engine.abort_named(None)
        gate.set()
        answer = await visitor.whole()
        assert (answer.status, "send it again" in answer.error()["message"]) == (503, True)

    asyncio.run(scene())


def test_a_line_of_a_batch_may_ask_for_vectors_in_the_background() -> None:
    """Behind what others ask for."""
    engine = FakeEngine(
        lambda request: [],
        info=fake_info(vocab_size=VOCAB_SIZE, tasks=["embed"], feature_info=told(POOLER), num_blocks=0),
        found=play,
    )
    executor = background_executor(make_context(Frontend(engine, TOKENIZER, engine.info), ServerConfig()))
    assert {"/v1/embeddings", "/v1/rerank", "/v1/score"} <= set(executor.urls)
    line = Line(custom_id="1", method="POST", url="/v1/embeddings", body=msgspec.Raw(b'{"input": "ab"}'))
    result = asyncio.run(executor.run(line))
    assert result.ok
    assert [request.priority for request in engine.requests] == [BACKGROUND]


def test_a_full_queue_refuses_and_counts() -> None:
    app, _ = house(ServerConfig(max_num_queued_reqs=1), max_num_seqs=1)
    answer = post("/v1/embeddings", {"input": ["a", "b", "c"]}, app)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) >= 1


def test_padding_has_no_effect_and_an_unknown_one_is_refused() -> None:
    for padding in (True, False, None, "longest"):
        assert "warnings" not in post("/v1/embeddings", {"input": "a", "padding": padding}).json()
    error = post("/v1/embeddings", {"input": "a", "padding": "wide"}).error()
    assert (error["code"], error["param"]) == (400, "padding")


def test_adapters_are_refused_here_too() -> None:
    assert post("/v1/embeddings", {"input": "a", "lora_request": {"lora_name": "b"}}).error()["param"] == "lora_request"
