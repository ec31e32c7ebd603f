"""The page that shows the API: it is whole in itself, and knows all that the OpenAPI document says of a field."""

from __future__ import annotations

import re
from typing import Any

import pytest
from server_kit import get_now, make_house, saying

from octavo.config import ServerConfig

NOT_SHOWN = {"additionalProperties", "propertyNames", "maxProperties", "not", "title"}
"""What the document says of fields besides; it needs no telling, or the errors tell it."""


def page(path: str = "/docs", **config: Any) -> tuple[str, dict[str, str]]:
    answer = get_now(make_house(saying("x"), ServerConfig(**config)).app, path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.body.decode(), answer.headers


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_it_names_no_other_host(path: str) -> None:
    text, headers = page(path)
    assert not re.findall(r"(?:https?:)?//[\w-]+", text)
    assert not re.findall(r"\bsrc\b|\bimport\b|url\(", text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"https?:|\*", policy)


def test_it_works_under_whatever_path_a_proxy_has_put_it() -> None:
    text, _ = page("/api/docs", root_path="/api")
    assert re.findall(r'href="([^"]*)"', text) == ["openapi.json"]
    assert set(re.findall(r'fetch\(["`](..)', text)) == {"./", ".$"}


def test_it_is_open_and_can_be_left_out() -> None:
    page(api_keys=("key",))
    app = make_house(saying("x"), ServerConfig(enable_docs=False)).app
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert get_now(app, path).status == 404


def test_texts_of_the_document_stay_texts() -> None:
    """No markup is ever made of them."""
    text, _ = page()
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


def keywords(schema: Any) -> set[str]:
    """Those with which a schema describes a field and what is in it."""
    if isinstance(schema, list):
        return set().union(*map(keywords, schema))
    if not isinstance(schema, dict):
        return set()
    inner = (keywords(part) for key in ("anyOf", "oneOf", "allOf", "items") for part in [schema.get(key)])
    return set(schema).union(*inner)


def test_it_knows_every_keyword_of_the_document() -> None:
    text, _ = page()
    document = get_now(make_house(saying("x"), ServerConfig(server_dev_mode=True)).app, "/openapi.json").json()
    schemas = document["components"]["schemas"].values()
    used = set().union(*(keywords(field) for schema in schemas for field in schema.get("properties", {}).values()))
    assert {"minimum", "maxLength", "$ref"} <= used
    named = set(re.findall(r"[$\w]+", text))
    assert used - NOT_SHOWN <= named
