"""A small HTTP client: it shares the cores with the engine it measures, so it does next to nothing per token."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads import Outcome, Request

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_TIMEOUT_S = 900


@dataclass(frozen=True, slots=True)
class Address:
    port: int
    model: str
    extra: Mapping[str, Any]
    host: str = "127.0.0.1"


def run(address: Address, requests: Sequence[Request]) -> Outcome:
    """Send all requests at once to /v1/completions, each over its own connection, and read their streams.

    Raises:
        RuntimeError: a request was refused, or its stream doesn't say how many tokens it had.
    """
    return asyncio.run(_run(address, requests))


async def _run(address: Address, requests: Sequence[Request]) -> Outcome:
    bodies = [message(address, request) for request in requests]
    started = time.perf_counter()
    async with asyncio.timeout(_TIMEOUT_S):
        replies = await asyncio.gather(*(_send(address, body) for body in bodies))
    first = replies[0].first - started if len(replies) == 1 else None
    return Outcome(max(reply.last for reply in replies) - started, [completion_tokens(r.raw) for r in replies], first)


def message(address: Address, request: Request) -> bytes:
    """The bytes of a streamed request to /v1/completions that closes its connection."""
    fields = {
        "model": address.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **address.extra,
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass(slots=True)
class _Reply:
    first: float
    last: float
    raw: bytes


async def _send(address: Address, message: bytes) -> _Reply:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(message)
        await writer.drain()
        parts: list[bytes] = []
        first = last = 0.0
        while part := await reader.read(1 << 16):
            last = time.perf_counter()
            if not first and b"data:" in part:
                first = last
            parts.append(part)
    finally:
        writer.close()
    return _Reply(first or last, last, b"".join(parts))


def completion_tokens(raw: bytes) -> int:
    """The tokens that a whole reply says it has.

    Raises:
        RuntimeError: the request was refused, or the reply does not say.
    """
    head, _, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    body = dechunked(body) if b"transfer-encoding: chunked" in head.lower() else body
    counts = _USAGE.findall(body)
    if b" 200" not in status or not counts:
        raise RuntimeError(f"{status.decode('latin-1')}: {body[-300:].decode('utf-8', 'replace')}")
    return int(counts[-1])


def dechunked(body: bytes) -> bytes:
    """A body without the frames of HTTP's chunked transfer encoding (RFC 9112, 7.1)."""
    parts, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            break
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(parts)
