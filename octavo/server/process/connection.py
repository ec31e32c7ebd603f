"""`connection_class`: connections that close if their client does not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from octavo.server.process.seldom import Seldom


def connection_class(
    protocol: type[HttpToolsProtocol] | type[WebSocketsSansIOProtocol],
    unread_timeout_s: float,
    closed: Callable[[], None],
) -> type[Any]:
    """Return a subclass of one of uvicorn's protocols, with a timeout for unread data.

    A response is paused while 64 KiB are unsent; a whole answer, which is written at once, may be much more. If the
    client reads none of it for `unread_timeout_s` seconds, the connection is aborted, and `closed` is called. An
    orderly close would wait for the client, too.
    """

    log = Seldom(logging.getLogger("octavo.server"))

    class WatchedConnection(protocol):  # type: ignore[valid-type, misc]  # the base is an argument
        _unread: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            self._watch_no_more()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._watch_no_more()
            super().connection_lost(exc)

        def _watch(self) -> None:
            unsent = self.transport.get_write_buffer_size()
            self._unread = self.loop.call_later(unread_timeout_s, self._look, unsent)

        def _look(self, unsent: int) -> None:
            if self.transport.get_write_buffer_size() < unsent:  # it reads, only slowly
                self._watch()
            else:
                self._drop()

        def _drop(self) -> None:
            closed()
            log.warning("A client has read nothing for %.0f s; its connection is closed.", unread_timeout_s)
            self.transport.abort()

        def _watch_no_more(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return WatchedConnection
