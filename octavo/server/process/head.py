"""`HttpConnection`: uvicorn's HTTP/1 connection, with checks before a request is complete.

It subclasses uvicorn's protocol where no setting of uvicorn's has the same effect:

- The time and size of a head (first line and headers) are limited. `timeout_keep_alive` begins when a response
  ends, and `h11_max_incomplete_event_size` belongs to uvicorn's other protocol, which parses in Python.
- Invalid requests get errors in the form of all others, and log lines at a limited rate (`send_400_response`).
- Offers of HTTP/2, as in the first request of Java's client, are ignored. The parser drops the bodies of such requests.
  So are offers of a WebSocket with methods other than GET, upon which uvicorn would neither answer nor close.
- What comes after a response, such as the rest of a body that was refused early, does not end `timeout_keep_alive`;
  only another request does.
- HTTP/1.0 clients get responses without chunked encoding, which they can't read.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import ApiError
from octavo.server.process.seldom import Seldom

MAX_HEAD = 64 << 10
_AROUND = len(": \r\n")
_TLS = b"\x16\x03"
"""First bytes of a TLS handshake."""
_IS_TLS = "A client (%s) began a TLS handshake: its URL must begin with http://, or this server needs --ssl-certfile."
_NO_HTTP = "A client (%s) sent an invalid HTTP request."


def http_class(head_timeout_s: float) -> type[HttpConnection]:
    """Return a connection class with this time limit for heads. Its connections share a log."""
    log = Seldom(logging.getLogger("octavo.server"))
    return type("HttpConnection", (HttpConnection,), {"head_timeout_s": head_timeout_s, "log": log})


class HttpConnection(HttpToolsProtocol):
    """A connection.

    Attributes:
        head_timeout_s: time limit for a head, from its first byte; for a new connection from its start.
        log: for client errors.
    """

    head_timeout_s: float
    log: Seldom

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_head = True
        self._num_heads = 0
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    # uvicorn narrows asyncio's BaseTransport, too.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        within, heads = self._in_head, self._num_heads
        self._feed(data)
        if not self._in_head or self.transport.is_closing():
            return
        if within and heads == self._num_heads:  # only part of a head
            self._start_timer()
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse_size()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _TooLargeError):
                self._refuse_size()
                return
            self.log.warning(_IS_TLS if data.startswith(_TLS) else _NO_HTTP, self.client[0] if self.client else "-")
            self.send_400_response("Invalid HTTP request received.")

    def _stay(self, rest: bytes) -> None:
        """Parse a request that offers another protocol, such as HTTP/2, as if it did not, as RFC 9110, 7.8 allows.

        The parser has dropped the data after such a request's headers.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported.")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*lines, b"", rest]))

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._offers_another_protocol():
            return
        # A head that comes in few pieces is complete before `data_received` counts it.
        if len(self.url) + sum(len(name) + len(value) + _AROUND for name, value in self.headers) > MAX_HEAD:
            raise _TooLargeError
        self._in_head, self._head_bytes = False, 0
        self._num_heads += 1
        self._stop_timer()
        self._unset_keepalive_if_required()  # set again if the previous response ended within this head
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = _UntilClosed(self.cycle).send  # type: ignore[method-assign]  # for this response only

    def on_message_complete(self) -> None:
        if self._offers_another_protocol():
            return
        self._in_head = True
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return bool(self.parser.get_method() == b"GET") and super()._should_upgrade()

    def _offers_another_protocol(self) -> bool:
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg} Send HTTP/1.1 as RFC 9112 defines it; use an HTTP library.")

    def _refuse_size(self) -> None:
        self._refuse(431, f"The request's headers are too large: at most {MAX_HEAD:,} bytes are taken.")

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._too_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self.cycle is not None and not self.cycle.response_complete):
            self._start_timer()  # the previous response takes this long, not the client
        elif self._head_bytes:
            self._refuse(408, f"The request's headers took longer than {self.head_timeout_s:g} s (--body-timeout).")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        body = ApiError(status, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _TooLargeError(Exception):
    """Raised in a callback, so that the parser stops: a request's headers are too large."""


class _UntilClosed:
    """A response to HTTP/1.0, which lacks chunked encoding: closing the connection ends it (RFC 9112, 6.3)."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._open = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._open:
                self._cycle.chunked_encoding = False
        elif self._open:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)
