"""The life of the front process: bind, serve, shut down, and leave no process behind."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

from octavo.config import ServerConfig
from octavo.core.errors import OctavoError
from octavo.core.garbage import seldom_collecting
from octavo.core.memory import memory_errors
from octavo.core.terminal import say
from octavo.engine.socket_folder import SocketFolder
from octavo.pool.child import Child
from octavo.pool.front import Front, FrontContext, front_app
from octavo.pool.pool import Pool
from octavo.pool.settings import ModelEntry, PoolConfig, of_child
from octavo.server.process.address import base_url, bind, release
from octavo.server.process.http_server import HttpServer, http_settings
from octavo.server.process.log import silent_access
from octavo.server.process.run import loop_factory, prepared
from octavo.server.process.stop import Stop
from octavo.server.process.tls import refresh
from octavo.server.task import end, wait_any

logger = logging.getLogger("octavo.server")

_AFTER_ABORT_S = 5.0


def run_pool(
    entries: Sequence[ModelEntry],
    pool: PoolConfig,
    server: ServerConfig,
    command: Sequence[str],
    announce: Callable[[str], None],
) -> int:
    """Serve several models until a signal. Return the process's exit status.

    Args:
        server: the settings of the front process.
        command: runs `child_main.main`; a child process for each model that is loaded.
        announce: called with the server's address once it is ready.
    """
    try:
        server = prepared(server)
        with ExitStack() as stack:
            stack.enter_context(memory_errors())
            sock = stack.enter_context(bind(server))
            stack.callback(release, server)
            runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
            runner.run(_serve(entries, pool, server, command, sock, announce))
    except OctavoError as exc:
        say(f"error: {exc}")
        return 1
    return 0


async def _serve(
    entries: Sequence[ModelEntry],
    config: PoolConfig,
    server: ServerConfig,
    command: Sequence[str],
    sock: socket.socket,
    announce: Callable[[str], None],
) -> None:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(Stop().listening())
        stack.enter_context(silent_access(server.disable_access_log_for_endpoints))
        stack.enter_context(seldom_collecting())
        folder = stack.enter_context(_socket_folder())
        pool = Pool(entries, config, _Starts(command, folder))
        stack.push_async_callback(pool.close)
        ctx = FrontContext(server)
        front = Front(pool, ctx)
        http = HttpServer(http_settings(front_app(front, ctx), server, ctx.http.count_unread))
        serving = asyncio.create_task(http.serve(sockets=[sock]))
        beside = [asyncio.create_task(pool.watch())]
        try:
            await wait_any(http.ready, stop.first)
            await front.batches.start()
            if server.enable_ssl_refresh and http.config.ssl is not None:
                beside.append(asyncio.create_task(refresh(http.config.ssl, server)))
            if config.preload_models:
                beside.append(asyncio.create_task(pool.preload()))
            if not stop.first.is_set():
                announce(_ready_line(entries, config, server, sock))
            await stop.first.wait()
            await _wind_down(front, pool, ctx, stop)
            http.should_exit, http.force_exit = True, stop.second.is_set()
            await serving
        finally:
            await front.batches.stop()
            for task in (*beside, serving):
                await end(task)


async def _wind_down(front: Front, pool: Pool, ctx: FrontContext, stop: Stop) -> None:
    """Refuse new requests and let those in flight finish; then stop the models, which aborts the rest."""
    lifecycle, patience_s = ctx.lifecycle, ctx.config.shutdown_timeout_s
    lifecycle.drain()
    await front.batches.stop()
    if lifecycle.inflight:
        text = "Stopping: %d requests in flight have %.0f s to finish; another SIGTERM or SIGINT ends them now."
        logger.info(text, lifecycle.inflight, patience_s)
    await wait_any(lifecycle.idle, stop.second, timeout=patience_s)
    if not lifecycle.idle.is_set():
        logger.warning("Stopping: %d requests did not finish and are aborted.", lifecycle.inflight)
    await pool.close()
    await wait_any(lifecycle.idle, timeout=_AFTER_ABORT_S)


class _Starts:
    """Starts the models' processes, each with socket files of its own in `folder`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._count = 0

    async def __call__(self, entry: ModelEntry) -> Child:
        self._count += 1
        key = str(self._count)
        server = of_child(entry, str(self._folder / f"{key}.http"), str(self._folder / f"{key}.jobs"))
        return await Child.start(entry.name, self._command, entry.engine, server, self._folder, key)


@contextmanager
def _socket_folder() -> Iterator[Path]:
    folder = SocketFolder()
    try:
        yield folder.path
    finally:
        folder.remove()


def _ready_line(entries: Sequence[ModelEntry], config: PoolConfig, server: ServerConfig, sock: socket.socket) -> str:
    where = server.uds or base_url(server, sock)
    names = ", ".join(entry.name for entry in entries)
    when = "at the start" if config.preload_models else "at their first request"
    return (
        f"The server is ready at {where} and serves {names}. Models are loaded {when}, "
        f"{config.max_loaded_models} at once. The states are at {base_url(server, sock)}{server.root}/v1/models"
    )
