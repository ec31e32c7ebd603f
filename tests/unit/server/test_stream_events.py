"""The framing of events."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.stream import event


class Chunk(msgspec.Struct):
    """Text to frame."""

    text: str


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_is_one_line_for_every_reader(text: str) -> None:
    data = event(Chunk(text))
    assert data.endswith(b"\n\n")
    (line,) = data.decode().removesuffix("\n\n").splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
