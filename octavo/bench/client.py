"""One benchmarked request over HTTP: streams from an OpenAI-compatible server and records every arrival time."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from octavo.bench.samples import Sample
from octavo.bench.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test, and the fields of every request to it."""

    base_url: str
    endpoint: str
    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    def request(self, sample: Sample) -> dict[str, Any]:
        said: dict[str, Any] = (
            {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.output_tokens}
            if self.chat
            else {"prompt": sample.prompt, "max_tokens": sample.output_tokens}
        )
        usage = {"stream_options": {"include_usage": True}}
        return {"model": self.model, "stream": True, **usage, **said, **self.body, **sample.fields}


async def measure(client: httpx.AsyncClient, target: Target, sample: Sample) -> Timing:
    """Send one request and read its stream. Failures are recorded in the timing, never raised."""
    timing = Timing(sample.prompt_tokens, started=time.perf_counter())
    try:
        async with client.stream(
            "POST", target.base_url + target.endpoint, json=target.request(sample), headers=dict(target.headers)
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                timing.error = f"HTTP {response.status_code}: {text[:300]}"
            else:
                await _read(response.aiter_lines(), timing)
    except (httpx.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.latency = time.perf_counter() - timing.started
    if timing.ok and not timing.arrivals:
        timing.error = "the stream ended without a token"
    return timing


async def _read(lines: AsyncIterator[str], timing: Timing) -> None:
    """Record arrivals from the lines of a server-sent event stream until it ends."""
    counted: int | None = None
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        event = json.loads(data)
        if "error" in event:
            timing.error = str(event["error"])
            return
        if _has_text(event):
            timing.arrivals.append(time.perf_counter() - timing.started)
        if usage := event.get("usage"):
            counted = usage.get("completion_tokens", counted)
            timing.prompt_tokens = usage.get("prompt_tokens", timing.prompt_tokens)
    if counted and not timing.arrivals:
        timing.arrivals.append(time.perf_counter() - timing.started)  # tokens without text, such as half a character
    timing.output_tokens = len(timing.arrivals) if counted is None else counted


def _has_text(event: Mapping[str, Any]) -> bool:
    """Return whether a chunk contains generated text of any kind."""
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False
