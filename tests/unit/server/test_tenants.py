"""Whose request it is: by key, header or user, on every route, in metrics, and never by what a client may not say."""

from __future__ import annotations

import asyncio
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import HELLO, Visitor, ask, ask_now, eventually, get_now, make_house, saying

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.parsing import tenant_by
from octavo.server.metrics.tenants import MOST_NAMES, OTHERS
from octavo.server.process.keys import with_key_file

CHAT = "/v1/chat/completions"
TEXT = {"prompt": "hi", "max_tokens": 3}
MESSAGES = {**HELLO, "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    f"{CHAT}/batch": {"messages": [HELLO["messages"]]},
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": MESSAGES,
    "/api/chat": {**HELLO, "model": "toy", "stream": False},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}},
}

NAMED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"metadata": {"user_id": "other"}},
    "/inference/v1/generate": {},
    "/api/chat": {},
}
"""How a body names its user, where that is not `user`."""


def key_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@pytest.mark.parametrize("path", BODIES)
def test_a_key_names_its_tenant_on_every_route(path: str) -> None:
    """A header and a `user` change nothing: clients could get more by inventing names."""
    house = make_house(saying("x"), ServerConfig(api_keys=("k1 name=red team", "k2 name=red team", "k3")))
    for key in ("k1", "k2", "k3"):
        headers = {**key_of(key), "x-tenant": "other"}
        assert (
            ask_now(house.app, path, BODIES[path] | NAMED.get(path, {"user": "other"}), headers=headers).status == 200
        )
    assert [one.tenant for one in house.engine.requests] == [
        "red team",
        "red team",
        f"key-{sha256(b'k3').hexdigest()[:8]}",
    ]
    text = get_now(house.app, "/metrics").body.decode()
    assert 'tenant="red team"' in text
    assert "k3" not in text


@pytest.mark.parametrize("path", BODIES)
def test_a_header_or_the_user_names_it_where_that_is_asked_for(path: str) -> None:
    body = BODIES[path] | NAMED.get(path, {"user": "other"})
    for by, expected in (
        ("user", "other" if "user" in str(NAMED.get(path, "user")) else ""),
        ("header:X-Team", "blue"),
        ("api-key", ""),
    ):
        house = make_house(saying("x"), ServerConfig(tenant_by=by))
        assert ask_now(house.app, path, body, headers={"x-team": "blue"}).status == 200
        (request,) = house.engine.requests
        assert request.tenant == expected


@pytest.mark.parametrize(("by", "param"), [("user", "user"), ("header:x-team", "x-team")])
@pytest.mark.parametrize("name", ["a" * 129, "a\tb"])
def test_what_can_not_be_a_name_is_refused(by: str, param: str, name: str) -> None:
    house = make_house(saying("x"), ServerConfig(tenant_by=by))
    answer = ask_now(house.app, CHAT, {**HELLO, "user": name}, headers={"x-team": name})
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "the name of a tenant has 1 to 128 printable characters" in error["message"]
    assert not house.engine.requests


def test_keys_of_a_file_have_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# teams\nalpha  name=search\nbeta:1\nwith space\n")
    house = make_house(saying("x"), with_key_file(ServerConfig(api_key_file=str(path))))
    for key, status in (("alpha", 200), ("beta:1", 200), ("with space", 200), ("alpha  name=search", 401)):
        assert ask_now(house.app, CHAT, HELLO, headers=key_of(key)).status == status
    names = [one.tenant for one in house.engine.requests]
    assert names[0] == "search"
    assert all(name.startswith("key-") for name in names[1:])
    with pytest.raises(ConfigError, match=r"name=, but the name of a tenant has 1 to 128"):
        make_house(saying("x"), ServerConfig(api_keys=("k name=",)))


@pytest.mark.parametrize("text", ["", "key", "header:", "header:a b", "User"])
def test_a_source_of_names_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="give api-key, user, or header:NAME"):
        tenant_by(text)


def test_metrics_have_a_bounded_number_of_names() -> None:
    house = make_house(saying("abc"), ServerConfig(tenant_by="user"))
    assert b"octavo:tenant_" not in get_now(house.app, "/metrics").body
    for number in range(MOST_NAMES + 5):
        assert ask_now(house.app, CHAT, {**HELLO, "user": f"u{number}"}).status == 200
    found = {
        sample.labels["tenant"]: sample.value
        for family in text_string_to_metric_families(get_now(house.app, "/metrics").body.decode())
        for sample in family.samples
        if sample.name == "octavo:tenant_requests_total"
    }
    assert len(found) == MOST_NAMES + 1
    assert found[OTHERS] == 5
    assert found["u0"] == 1


def test_a_tenant_may_have_so_many_requests_and_no_more() -> None:
    async def visit() -> None:
        gate = asyncio.Event()
        house = make_house(saying("x"), ServerConfig(tenant_by="user", max_tenant_requests=2), pace=gate.wait)
        first = [Visitor(house.app, CHAT, HELLO | {"user": "ann"}) for _ in range(2)]
        await eventually(lambda: len(house.engine.running) == 2)
        refused = await ask(house.app, CHAT, HELLO | {"user": "ann"})
        assert refused.status == 429
        assert refused.error()["type"] == "TooManyRequestsError"
        assert refused.error()["message"].startswith("Tenant 'ann' has 2 requests here, as many as --max-tenant-requ")
        assert refused.headers["retry-after"] == "1"
        other = Visitor(house.app, CHAT, HELLO | {"user": "bob"})
        await eventually(lambda: len(house.engine.running) == 3)
        live = (await ask(house.app, "/debug/requests", method="GET")).json()["requests"]
        assert sorted(one["tenant"] for one in live) == ["ann", "ann", "bob"]
        text = (await ask(house.app, "/metrics", method="GET")).body.decode()
        assert re.search(r'octavo:admission_rejections_total\{[^}]*reason="tenant"\} 1.0', text)
        assert re.search(r'octavo:tenant_requests_waiting\{[^}]*tenant="ann"\} 2.0', text)
        gate.set()
        for visitor in (*first, other):
            assert (await visitor.whole()).status == 200
        assert (await ask(house.app, CHAT, HELLO | {"user": "ann"})).status == 200

    asyncio.run(visit())
