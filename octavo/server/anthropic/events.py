"""Streaming of a message: Anthropic's events, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import UNSET

from octavo.server.openai.routing import ChoiceDelta
from octavo.server.stream import named_event

PING = named_event("ping", {"type": "ping"})
"""Keeps a silent stream alive."""
SIGNATURE = "octavo"
"""Of all thinking. It proves nothing; but some clients send back only thinking that is signed."""


class ContentBlocks:
    """Numbers, opens and closes the blocks of one answer.

    Attributes:
        calls: whether there was a tool call.
    """

    def __init__(self) -> None:
        self.calls = False
        self._index = -1
        self._kind = ""

    def take(self, news: ChoiceDelta) -> Iterator[bytes]:
        if news.reasoning:
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": news.reasoning})
        if news.content:
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": news.content})
        for call in news.calls:
            if call.id is not UNSET:
                self.calls = True
                name = call.function.name
                block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": name, "input": {}}
                yield from self._open(f"call {call.index}", block)
            if call.function.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})

    def close(self) -> Iterator[bytes]:
        """Close the last block. An empty answer gets one empty text block."""
        if self._index < 0:
            yield from self._open("text", {"type": "text", "text": ""})
        yield from self._stop()

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if kind == self._kind:
            return
        if self._index >= 0:
            yield from self._stop()
        self._index += 1
        self._kind = kind
        yield named_event(
            "content_block_start", {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> Iterator[bytes]:
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})
