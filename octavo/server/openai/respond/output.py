"""`ResponseOutput`: the items of a response while it is generated, and their events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.server.openai.responses import ChatLogprobs
from octavo.server.openai.routing import ChoiceDelta

ResponseEvent = dict[str, Any]
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponseOutput:
    """Reasoning, a message and calls, in order.

    Attributes:
        items: those that have begun; the last one may be incomplete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._held: list[Any] = []  # log-probabilities of tokens before the first text

    def take(self, news: ChoiceDelta, logprobs: ChatLogprobs | None = None) -> Iterator[ResponseEvent]:
        if news.reasoning:
            yield from self._begin("reasoning", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""})
            yield self._add(news.reasoning, "response.reasoning_text.delta")
        told = self._held + (msgspec.to_builtins(logprobs.content) if logprobs else [])
        self._held = []
        if news.content:
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin("message", {"role": "assistant", "content": []}, part)
            yield self._add(news.content, "response.output_text.delta", told)
        elif told:  # tokens without text: of an incomplete character, or of what may be a call
            kind = self._open["type"] if self._open is not None else "reasoning"
            if kind == "message":
                yield self._add("", "response.output_text.delta", told)
            elif kind == "reasoning":
                self._held = told
        for call in news.calls:
            if call.id is not UNSET:
                yield from self._call(str(call.id), str(call.function.name))
            if call.function.arguments and self._open is not None:
                self._open["arguments"] += call.function.arguments
                yield self._event("response.function_call_arguments.delta", delta=call.function.arguments)

    def close(self, status: str, *, call: str = "") -> Iterator[ResponseEvent]:
        """End the open item; nothing follows. `call` is the status if that is a call."""
        if not self.items:
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._begin("message", {"role": "assistant", "content": []}, part)
        called = self._open is not None and self._open["type"] == "function_call"
        yield from self._end(call if call and called else status)

    def _begin(self, kind: str, fields: dict[str, Any], part: dict[str, Any]) -> Iterator[ResponseEvent]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end(COMPLETED)
        prefix = {"message": "msg", "reasoning": "rs"}[kind]
        yield from self._added({"id": _new_id(prefix), "type": kind, "status": IN_PROGRESS, **fields})
        assert self._open is not None
        self._open["content"].append(part)
        empty = {name: [] if isinstance(value, list) else value for name, value in part.items()}
        yield self._event("response.content_part.added", content_index=0, part=empty)

    def _call(self, call_id: str, name: str) -> Iterator[ResponseEvent]:
        yield from self._end(COMPLETED)
        item = {"id": _new_id("fc"), "type": "function_call", "status": IN_PROGRESS}
        yield from self._added(item | {"call_id": call_id, "name": name, "arguments": ""})

    def _added(self, item: dict[str, Any]) -> Iterator[ResponseEvent]:
        self.items.append(item)
        self._open = item
        shown = {name: [] if name == "content" else value for name, value in item.items()}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _add(self, text: str, kind: str, logprobs: list[Any] | None = None) -> ResponseEvent:
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        event = self._event(kind, content_index=0, delta=text)
        if logprobs is not None:
            part["logprobs"] += logprobs
            event["logprobs"] = logprobs
        return event

    def _end(self, status: str) -> Iterator[ResponseEvent]:
        item = self._open
        if item is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            (part,) = item["content"]
            told = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **told)
            yield self._event("response.content_part.done", content_index=0, part=part)
        self._open = None
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        assert self._open is not None
        return {"type": kind, "item_id": self._open["id"], "output_index": len(self.items) - 1, **fields}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
