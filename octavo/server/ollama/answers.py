"""`OllamaAnswer`: OpenAI's chunks of one answer, as the objects of Ollama's API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.timestamp import timestamp

Piece = dict[str, Any]


class OllamaAnswer:
    """One answer. The chunks go to `take`, then `end` is called once.

    Args:
        model: its name, as the client wrote it.
        wrap: makes the fields for new text, thinking and calls of a route.
    """

    def __init__(self, model: str, wrap: Callable[[str, str, Sequence[Piece]], Piece]) -> None:
        self._model = model
        self._wrap = wrap
        self._calls: dict[int, dict[str, str]] = {}
        self._finish = ""
        self._usage: Mapping[str, int] = {}
        self._warnings: list[str] = []
        self._begun = time.monotonic_ns()
        self._first = 0

    def take(self, chunk: Mapping[str, Any]) -> Piece | None:
        """Return the object for a chunk of a streamed completion, or None if it has nothing to show.

        Raises:
            ApiError: the engine aborted the answer, for which Ollama has no reason.
        """
        self._first = self._first or time.monotonic_ns()
        self._usage = chunk.get("usage") or self._usage
        self._warnings += chunk.get("warnings") or []
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {"content": choice.get("text")}
            self._collect(delta.get("tool_calls") or [])
            finish = choice.get("finish_reason")
            self._finish = finish or self._finish
            if finish == "abort":
                raise ApiError(503, "The server aborted this request before its answer was complete. Send it again.")
            calls = self._whole_calls() if finish else []
            logprobs = _logprobs(choice.get("logprobs"))
            text, thinking = delta.get("content") or "", delta.get("reasoning") or ""
            if text or thinking or calls or logprobs:
                told = self._wrap(text, thinking, calls) | ({"logprobs": logprobs} if logprobs else {})
                return self._head() | told | {"done": False}
        return None

    def end(self) -> Piece:
        """Return the last object, with counts and nanoseconds."""
        now = time.monotonic_ns()
        first = self._first or now
        told = self._head() | self._wrap("", "", []) | {"done": True}
        counts = {
            "done_reason": "length" if self._finish == "length" else "stop",
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": first - self._begun,
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": now - first,
        }
        return told | counts | ({"warnings": self._warnings} if self._warnings else {})

    def loaded(self) -> Piece:
        """Return the object for a request that only asks for the model to be loaded."""
        return self._head() | self._wrap("", "", []) | {"done": True, "done_reason": "load"}

    def _head(self) -> Piece:
        return {"model": self._model, "created_at": timestamp(time.time())}

    def _collect(self, deltas: Sequence[Mapping[str, Any]]) -> None:
        for delta in deltas:
            call = self._calls.setdefault(delta["index"], {"name": "", "arguments": ""})
            for name, value in delta["function"].items():
                call[name] += value or ""

    def _whole_calls(self) -> list[Piece]:
        """Return the calls, whose arguments are objects; a call that was cut short is left out."""
        found = []
        for call in self._calls.values():
            try:
                found.append({"function": {"name": call["name"], "arguments": json.loads(call["arguments"] or "{}")}})
            except ValueError:
                continue
        return found


def in_message(text: str, thinking: str, calls: Sequence[Piece]) -> Piece:
    """Return the fields of `/api/chat`."""
    message: Piece = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return {"message": message}


def in_response(text: str, thinking: str, calls: Sequence[Piece]) -> Piece:
    """Return the fields of `/api/generate`, which has no calls."""
    return {"response": text} | ({"thinking": thinking} if thinking else {})


def merged(pieces: Sequence[Piece]) -> Piece:
    """Return the objects of a stream as one."""
    *parts, whole = pieces
    _merge(whole, parts, ("response", "thinking", "logprobs"))
    if "message" in whole:
        _merge(whole["message"], [part["message"] for part in parts], ("content", "thinking", "tool_calls"))
    return whole


def _merge(whole: Piece, parts: Sequence[Piece], names: Sequence[str]) -> None:
    for name in names:
        if found := [part[name] for part in parts if part.get(name)]:
            whole[name] = _sum(found)


def _sum(values: Sequence[Any]) -> Any:
    return "".join(values) if isinstance(values[0], str) else [one for value in values for one in value]


def _logprobs(given: Mapping[str, Any] | None) -> list[Piece]:
    """Return the log-probabilities of a chat's or a completion's chunk."""
    if not given:
        return []
    if "content" in given:
        return [
            _token(one)
            | ({"top_logprobs": [_token(top) for top in one["top_logprobs"]]} if one["top_logprobs"] else {})
            for one in given["content"] or []
        ]
    tops = given.get("top_logprobs") or [None] * len(given["tokens"])
    return [
        {"token": token, "logprob": value}
        | ({"top_logprobs": [{"token": name, "logprob": at} for name, at in top.items()]} if top else {})
        for token, value, top in zip(given["tokens"], given["token_logprobs"], tops, strict=True)
    ]


def _token(entry: Mapping[str, Any]) -> Piece:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry.get("bytes")}
