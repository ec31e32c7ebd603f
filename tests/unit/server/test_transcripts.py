"""Prompts and outputs are in the log when they are asked for, cut to length, and at no other time."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from server_kit import HELLO, Visitor, ask_now, ids, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError

SECRET, ANSWER = "my secret", "its answer"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": SECRET}),
    (CHAT, {"messages": [{"role": "user", "content": SECRET}]}),
    ("/v1/responses", {"input": SECRET}),
    ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 20}),
]


def logged(caplog: pytest.LogCaptureFixture, level: int, path: str, body: dict[str, Any], **config: Any) -> list[str]:
    """The lines of the log, with the level of each."""
    caplog.clear()
    with caplog.at_level(level):
        answer = ask_now(make_house(saying(ANSWER), ServerConfig(**config)).app, path, body)
    assert answer.status == 200
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("config", "level"),
    [
        ({}, logging.DEBUG),
        ({"max_log_len": 100}, logging.DEBUG),
        ({"enable_log_requests": True}, logging.INFO),
    ],
)
def test_nothing_is_logged_that_was_not_asked_for(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], stream: bool, config: dict[str, Any], level: int
) -> None:
    lines = "\n".join(logged(caplog, level, path, body | {"stream": stream}, **config))
    assert "prompt tokens" in lines
    assert SECRET not in lines
    assert ANSWER not in lines
    assert str(ids(SECRET))[1:-1] not in lines


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_output_with_the_id(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], stream: bool
) -> None:
    config = {"enable_log_requests": True, "enable_log_outputs": True, "enable_log_deltas": False}
    lines = logged(caplog, logging.DEBUG, path, body | {"stream": stream}, **config)
    (asks,) = [line for line in lines if " asks " in line]
    (ended,) = [line for line in lines if " ended (stop): " in line and "choice 0" in line]
    (tokens,) = [line for line in lines if " in tokens " in line and "choice 0" in line]
    assert asks.startswith("DEBUG")
    assert SECRET in asks
    assert str(ids(SECRET))[1:-1] in asks
    assert ended.startswith("INFO")
    assert ended.endswith(repr(ANSWER))
    assert tokens.startswith("DEBUG")
    assert str(ids(ANSWER))[1:-1] in tokens
    name = asks.split()[2]
    assert all(line.split()[2].rstrip(",") == name for line in (ended, tokens))


def test_the_pieces_of_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    config = {"enable_log_requests": True, "enable_log_outputs": True}
    body = {"prompt": SECRET, "stream": True, "n": 2}
    lines = logged(caplog, logging.INFO, TEXT, body, **config)
    for choice in (0, 1):
        pieces = [line.rpartition(": ")[2] for line in lines if f"choice {choice} goes on" in line]
        assert "".join(piece.strip("'") for piece in pieces) == ANSWER
        assert len(pieces) == len(ANSWER)
    assert not any("goes on" in line for line in logged(caplog, logging.INFO, TEXT, {"prompt": SECRET}, **config))


def test_what_is_logged_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    config = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 3}
    lines = logged(caplog, logging.DEBUG, TEXT, {"prompt": SECRET}, **config)
    assert any(line.endswith(f" asks 'my ', in tokens {ids('my ')}") for line in lines)
    assert any(line.endswith("ended (stop): 'its'") for line in lines)
    assert any(line.endswith(f"choice 0 in tokens {ids('its')}") for line in lines)


def test_a_text_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    config = {"enable_log_requests": True, "enable_log_outputs": True}
    lines = logged(caplog, logging.DEBUG, TEXT, {"prompt": "a\nINFO Request x ended\u2028b"}, **config)
    assert any("INFO Request x ended" in line for line in lines)
    assert [line for line in lines if len(line.splitlines()) != 1] == []


def test_a_client_that_leaves_has_had_what_was_generated(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(enable_log_requests=True, enable_log_outputs=True, enable_log_deltas=False)

    async def scenario() -> None:
        steps = asyncio.Semaphore(4)
        house = make_house(saying(ANSWER), config, pace=steps.acquire)  # type: ignore[arg-type]
        visitor = Visitor(house.app, CHAT, HELLO | {"stream": True})
        await visitor.heard.wait()
        visitor.leaves.set()
        await visitor.whole()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if "choice 0 ended" in record.getMessage()]
    assert "ended (abort): 'i" in line


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"enable_log_outputs": True}, "--enable-log-outputs has no effect without --enable-log-requests: set that"),
        ({"max_log_len": 10}, "--max-log-len has no effect without --enable-log-requests"),
        ({"enable_log_deltas": False}, "--no-enable-log-deltas has no effect without --enable-log-outputs"),
        ({"allowed_methods": ("GET",)}, "--allowed-methods has no effect without --allowed-origins"),
        ({"allow_credentials": True}, "--allow-credentials has no effect without --allowed-origins"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerConfig(**settings).check()


def test_settings_with_what_they_need_are_taken() -> None:
    ServerConfig(enable_log_requests=True, max_log_len=10).check()
    ServerConfig(allowed_origins=("*",), allowed_headers=("a",), allow_credentials=True).check()
