"""Which model a request names, however its body arrives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from octavo.core.errors import InvalidRequestError
from octavo.pool.naming import Body, named_body
from octavo.server.errors import ApiError

LIMIT = 1 << 20
EDGE = "----edge"
FORM = f"multipart/form-data; boundary={EDGE}"


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form of fields; one whose name ends in .wav is a file."""
    found = b""
    for name, content in parts:
        file = f'; filename="{name}"' if name.endswith(".wav") else ""
        field = "file" if file else name
        found += f'--{EDGE}\r\nContent-Disposition: form-data; name="{field}"{file}\r\n\r\n'.encode()
        found += content + b"\r\n"
    return found + f"--{EDGE}--\r\n".encode()


async def read(body: bytes, kind: str, query: str, size: int, path: str) -> tuple[Body, bytes]:
    """Return what was found, and the body as it is sent again."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)] or [b""]

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    headers = [(b"content-type", kind.encode())]
    scope: dict[str, Any] = {"type": "http", "headers": headers, "query_string": query.encode(), "method": "POST"}
    scope["path"] = path
    found = await named_body(Request(scope, receive), LIMIT, LIMIT)
    again, sent = found.receive(receive), b""
    while True:
        message = await again()
        sent += message["body"]
        if not message["more_body"]:
            break
    found.close()
    return found, sent


def named(
    body: bytes, kind: str = "application/json", query: str = "", size: int = LIMIT, path: str = "/"
) -> str | None:
    found, sent = asyncio.run(read(body, kind, query, size, path))
    assert sent == body
    return found.model


def test_the_body_precedes_the_query() -> None:
    assert named(b'{"model": "a"}') == "a"
    assert named(b'{"model": "a"}', query="model=b") == "a"
    assert named(b'{"prompt": "x"}', query="model=b%2Fc") == "b/c"
    assert named(b'{"model": null}') is None
    assert named(b"", query="model=b") == "b"
    assert named(b"") is None
    assert named("﻿".encode() + b'{"model": "a"}') == "a"


@pytest.mark.parametrize("body", [b"[1]", b'{"model"', b"7", b'{"a": \xff}'])
def test_what_is_no_object_is_refused_as_by_a_server_of_one_model(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        named(body)
    assert caught.value.status == 400


def test_other_bodies_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="model must be a string"):
        named(b'{"model": 1}')
    with pytest.raises(ApiError) as caught:
        named(b"a=b", "application/x-www-form-urlencoded")
    assert caught.value.status == 415
    with pytest.raises(ApiError) as caught:
        named(b" " * (LIMIT + 1))
    assert caught.value.status == 413
    with pytest.raises(ApiError) as caught:
        named(form(("a.wav", b"x" * LIMIT)), FORM)
    assert caught.value.status == 413


@given(
    name=st.text(st.characters(min_codepoint=32, exclude_characters="\x7f"), min_size=1, max_size=20),
    audio=st.binary(max_size=300),
    size=st.integers(1, 64),
    first=st.booleans(),
)
def test_a_form_s_field_is_found_in_any_pieces(name: str, audio: bytes, size: int, first: bool) -> None:
    audio = audio.replace(b"--", b"++")
    parts = [("model", name.encode()), ("a.wav", audio)]
    body = form(*(parts if first else reversed(parts)))
    assert named(body, FORM, size=size) == name


def test_ollama_s_clients_name_models_in_their_ways() -> None:
    assert named(b'{"name": "a"}', "text/plain", path="/api/show") == "a"
    assert named(b'{"name": "a", "model": "b"}', path="/api/show") == "b"
    assert named(b'{"name": "a"}') is None


def test_a_file_named_model_is_no_name() -> None:
    body = form(("model.wav", b"x"), ("prompt", b"y"))
    assert named(body, FORM) is None
    assert named(b"no form at all", FORM) is None
    assert named(json.dumps({"a": 1}).encode(), "multipart/form-data") is None
