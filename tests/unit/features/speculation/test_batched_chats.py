"""Fields of features in a request with several conversations."""

from __future__ import annotations

from typing import Any

from server_kit import ask_now, make_house, saying

from octavo.features.speculation.payload import NAME


def options(path: str, messages: list[Any], **fields: Any) -> list[bytes | None]:
    """Return the options of the engine half, of each conversation."""
    house = make_house(saying("x"), features=[NAME])
    assert ask_now(house.app, path, {"messages": messages, **fields}).status == 200
    return [None if (one := request.options.get(NAME)) is None else bytes(one) for request in house.engine.requests]


def test_each_conversation_has_them() -> None:
    talk = [{"role": "user", "content": "a"}]
    (alone,) = options("/v1/chat/completions", talk, speculative=False)
    (without,) = options("/v1/chat/completions", talk)
    assert alone != without
    assert options("/v1/chat/completions/batch", [talk, talk], speculative=False) == [alone, alone]
