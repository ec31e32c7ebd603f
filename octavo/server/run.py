"""Running the server: bind first, open the engine, serve, and leave in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import TYPE_CHECKING

from octavo.config import ServerConfig
from octavo.core.errors import OctavoError
from octavo.server.address import bind_all, release
from octavo.server.collector import seldom_collecting
from octavo.server.keys import with_key_file
from octavo.server.stop import Stop
from octavo.server.tls import check_tls

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend

OpenFrontend = Callable[[], AbstractAsyncContextManager["Frontend"]]
Announce = Callable[[str], None]
Lead = Callable[["Frontend", ServerConfig, list[socket.socket], Announce, Stop], Awaitable[None]]


def run_server(open_frontend: OpenFrontend, config: ServerConfig, *, announce: Announce = print) -> int:
    """Bind, open the engine, serve until a signal comes; the process's exit status.

    Args:
        open_frontend: starts the engine when entered and closes it when left.
        announce: told where the server is, once it is ready.
    """
    log_to(config)
    try:
        config = with_key_file(config)
        check_tls(config)
        with ExitStack() as stack:
            socks = [stack.enter_context(sock) for sock in bind_all(config)]
            stack.callback(release, config)
            runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
            return runner.run(_run(open_frontend, config, socks, announce))
    except OctavoError as exc:
        print(f"octavo: error: {exc}", file=sys.stderr)
        return 1


async def _run(
    open_frontend: OpenFrontend, config: ServerConfig, socks: list[socket.socket], announce: Announce
) -> int:
    with Stop().listening() as stop:
        stop.loading = asyncio.current_task()
        # As long as the engine's process is busy importing and loading, another core is free for ours.
        importing = asyncio.create_task(asyncio.to_thread(_import_lead))
        try:
            async with open_frontend() as frontend:
                lead = await importing
                stop.loading = None
                with seldom_collecting():
                    await lead(frontend, config, socks, announce, stop)
        except asyncio.CancelledError:
            if not stop.first.is_set():
                raise
            print("octavo: stopped before the server was ready.", file=sys.stderr)
            return 1
    return 0


def _import_lead() -> Lead:
    from octavo.server.serving import lead

    return lead


def log_to(config: ServerConfig, who: str = "") -> None:
    """Send the log to standard error, with the name of the process if it is one of several."""
    level = getattr(logging, config.log_level.upper(), logging.INFO)
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {f'[{who}] ' if who else ''}%(message)s")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
