"""What answers tell of themselves: where their time went, and what computed them."""

from __future__ import annotations

from typing import Any

import pytest
from server_kit import HELLO, Answer, ask_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.output import RequestTimes
from octavo.engine.fake import fake_info
from octavo.server.fingerprint import check_fingerprint, fingerprint
from octavo.server.openai.generation import timings
from octavo.server.openai.responses import Timings
from octavo.version import __version__

CHAT, TEXT = ("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "Hello"})
TIMED = ServerConfig(enable_per_request_metrics=True)
FIELDS = ["time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"]


def ask(path: str, body: dict[str, Any], config: ServerConfig | None = TIMED) -> Answer:
    return ask_now(make_house(saying("some text"), config).app, path, body)


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
@pytest.mark.parametrize("more", [{}, {"stop": ["tex"]}, {"max_tokens": 3}])
def test_a_whole_answer_tells_where_its_time_went(path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    metrics = ask(path, body | more).json()["metrics"]
    assert list(metrics) == FIELDS
    assert all(value >= 0 for value in metrics.values())
    assert "metrics" not in ask(path, body | more, None).json()


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
@pytest.mark.parametrize("more", [{}, {"stop": ["tex"]}, {"stream_options": {"include_usage": True}}])
def test_a_stream_tells_it_in_its_last_chunk(path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    *others, last = ask(path, body | {"stream": True} | more).events()
    assert list(last["metrics"]) == FIELDS
    assert last["system_fingerprint"].startswith("octavo-")
    for chunk in others:
        assert not {"metrics", "system_fingerprint"} & chunk.keys()


@pytest.mark.parametrize(("path", "body"), [CHAT, TEXT])
def test_one_token_has_no_time_between_tokens(path: str, body: dict[str, Any]) -> None:
    one = body | {"max_tokens": 1}
    assert ask(path, one).json()["metrics"]["mean_itl_ms"] is None
    assert "mean_itl_ms" not in ask(path, one | {"stream": True}).events()[-1]["metrics"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT[0], HELLO | {"n": 2}),
        (TEXT[0], {"prompt": "Hello", "n": 2}),
        (TEXT[0], {"prompt": "Hello", "best_of": 2}),
        (TEXT[0], {"prompt": ["a", "b"]}),
        ("/v1/chat/completions/batch", {"messages": [HELLO["messages"]] * 2}),
    ],
)
def test_several_choices_have_no_time_of_their_own(path: str, body: dict[str, Any]) -> None:
    answer = ask(path, body)
    assert answer.status == 200
    assert "metrics" not in answer.json()


@pytest.mark.parametrize(
    ("times", "tokens", "told"),
    [
        (RequestTimes(1.0, 1.5, 2.0, 3.0), 5, Timings(500.0, 1000.0, 500.0, 250.0, 5 / 1.5)),
        (RequestTimes(1.0, 1.5, 2.0, 3.0), 1, Timings(500.0, 1000.0, 500.0, None, 1 / 1.5)),
        (RequestTimes(1.0, 1.5, 0.0, 3.0), 0, Timings(None, None, 500.0, None, 0.0)),
        (RequestTimes(1.0, 0.0, 0.0, 3.0), 0, Timings(None, None, None, None, None)),
    ],
)
def test_the_figures(times: RequestTimes, tokens: int, told: Timings) -> None:
    found = timings(times, tokens)
    for name in FIELDS:
        assert getattr(found, name) == pytest.approx(getattr(told, name))


def test_the_fingerprint_is_that_of_what_computes() -> None:
    info = fake_info(name="toy")
    one = fingerprint(ServerConfig(), info)
    assert one is not None
    assert one.startswith(f"octavo-{__version__}-")
    assert one == fingerprint(ServerConfig(port=1, fingerprint_mode="hash"), fake_info(name="toy", phases={"a": 1.0}))
    other = [{"name": "other"}, {"dtype": "bfloat16"}, {"weights": "4 bits"}, {"kernels": "torch"}, {"kv_form": "fp8"}]
    for changes in other:
        assert fingerprint(ServerConfig(), fake_info(**{"name": "toy", **changes})) != one


def test_the_fingerprint_may_be_ones_own_or_none() -> None:
    own = ServerConfig(fingerprint_mode="custom", fingerprint_value="blue")
    assert ask(*CHAT, own).json()["system_fingerprint"] == "blue"
    none = ServerConfig(fingerprint_mode="none")
    assert ask(*TEXT, none).json()["system_fingerprint"] is None
    assert "system_fingerprint" not in ask(CHAT[0], HELLO | {"stream": True}, none).events()[-1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ServerConfig(fingerprint_mode="custom"), "needs --fingerprint-value"),
        (ServerConfig(fingerprint_value="blue"), "add that"),
    ],
)
def test_half_a_fingerprint_is_refused(config: ServerConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_fingerprint(config)
