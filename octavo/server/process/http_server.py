"""`HttpServer`: uvicorn, with the server's connections, limits and logs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from octavo.config import ServerConfig
from octavo.server.process.connection import connection_class
from octavo.server.process.head import http_class
from octavo.server.process.log import uvicorn_log

_BACKLOG = 4096


class HttpServer(uvicorn.Server):
    """Uvicorn's server without its signal handlers. `ready` is set once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def accept(self, sock: socket.socket) -> asyncio.Server:
        """Accept connections on another socket, too, until the returned server is closed. Call once ready.

        `sock` stays open.
        """
        protocol_class: Any = self.config.http_protocol_class  # as in uvicorn's own startup
        protocol = partial(
            protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        return await loop.create_server(protocol, sock=sock.dup(), ssl=self.config.ssl, backlog=_BACKLOG)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_settings(app: ASGIApp, config: ServerConfig, count_unread: Callable[[], None]) -> uvicorn.Config:
    """Return uvicorn's settings. `count_unread` is called when a client is dropped because it does not read."""
    return uvicorn.Config(
        app,
        http=connection_class(http_class(config.body_timeout_s), config.unread_timeout_s, count_unread),
        ws=connection_class(WebSocketsSansIOProtocol, config.unread_timeout_s, count_unread),
        ws_max_size=config.max_body_bytes,
        ws_per_message_deflate=False,  # chunks are small: compression costs more than it saves
        lifespan="off",
        **uvicorn_log(config),
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=config.keep_alive_s,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers,
        timeout_graceful_shutdown=1,
    )
