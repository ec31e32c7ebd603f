"""Fields of features in a request with several conversations."""

from __future__ import annotations

import msgspec
from server_kit import ask_now, make_house, saying

from octavo.features.speculation.payload import NAME


def test_each_conversation_has_them() -> None:
    talk = [{"role": "user", "content": "a"}]
    house = make_house(saying("x"), features=[NAME])
    body = {"messages": [talk, talk], "speculative": False}
    assert ask_now(house.app, "/v1/chat/completions/batch", body).status == 200
    found = [msgspec.msgpack.decode(request.options[NAME]) for request in house.engine.requests]
    assert len(found) == 2
    assert found[0] == found[1]
