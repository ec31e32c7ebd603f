"""Forwards a request to a model's process and its response to the client, as it arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from octavo.pool.pool import Lease, Member, Pool, lost
from octavo.pool.seats import Standing
from octavo.server.error_forms import stream_error
from octavo.server.siblings.link import forwarded
from octavo.server.stream import until_disconnect

_STREAMS = (b"text/event-stream", b"application/x-ndjson")


@asynccontextmanager
async def leased(pool: Pool, member: Member, receive: Receive) -> AsyncGenerator[Lease, None]:
    """Let a request in for the time of the block. `receive` reports that the client has disconnected.

    Raises:
        ApiError: as `Pool.acquire`.
        ClientGoneError: the client has disconnected while it waited.
    """
    if member.seat.standing is Standing.IN:
        lease = await pool.acquire(member)
    else:
        lease = await until_disconnect(receive, pool.acquire(member))
    try:
        yield lease
    finally:
        lease.release()


async def relay(member: Member, lease: Lease, scope: Scope, receive: Receive, send: Send) -> None:
    """Forward one request. If the model's process ends, the client gets an error: an event, if it reads a stream.

    Raises:
        ApiError: 503, the process ended before the response began.
    """
    begun = streams = False
    try:
        async with forwarded(lease.child.requests, scope, receive) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    begun, streams = True, _is_stream(message)
                await send(message)
    except ConnectionError:
        await lease.child.ending()
        error = lost(member)
        if not begun:
            raise error from None
        if not streams:
            raise
        await send({"type": "http.response.body", "body": stream_error(scope, error), "more_body": False})


async def first_answer(member: Member, request: Request, send: Send) -> bool:
    """Forward a request to a running process, also one that sleeps. Return False, and nothing else, if it answers 404.

    Raises:
        ApiError: 503, the process has ended.
    """
    assert member.child is not None
    try:
        async with forwarded(member.child.requests, request.scope, request.receive) as messages:
            async for message in messages:
                if message["type"] == "http.response.start" and message["status"] == HTTPStatus.NOT_FOUND:
                    return False
                await send(message)
    except ConnectionError:
        raise lost(member) from None
    return True


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and value.startswith(_STREAMS) for name, value in start["headers"])
