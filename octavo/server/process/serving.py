"""`serve`: a front end behind HTTP, until a stop request."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import ServerConfig
from octavo.core.errors import EngineDeadError
from octavo.server.app import create_app
from octavo.server.batch.service import BatchService
from octavo.server.metrics.log_line import log_stats
from octavo.server.metrics.metrics import Metrics
from octavo.server.process.address import base_url, bind
from octavo.server.process.http_server import HttpServer, http_settings
from octavo.server.process.lifecycle import Lifecycle
from octavo.server.process.log import silent_access
from octavo.server.process.stop import Stop
from octavo.server.process.tls import refresh
from octavo.server.routes.home import curl_example
from octavo.server.siblings.crew import Crew, leading
from octavo.server.siblings.link import listening
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.server.task import wait_any
from octavo.server.tracing.start import tracing
from octavo.text.frontend import Frontend

logger = logging.getLogger("octavo.server")

_AFTER_ABORT_S = 5.0
_AT_ONCE_S = 1.0
_LOOK_S = 0.1
_LAST_WORDS_S = 2.0
"""Seconds for which a server still responds after its engine has died: with the reason, also on /health."""


async def lead(
    frontend: Frontend, config: ServerConfig, socks: list[socket.socket], announce: Callable[[str], None], stop: Stop
) -> None:
    """Run `serve` as the first, or only, API process of the server."""
    if config.api_server_count == 1:
        await serve(frontend, config, sock=socks[0], announce=announce, stop=stop)
        return
    async with leading(frontend, config, socks) as crew:
        siblings = crew.siblings
        await serve(frontend, config, sock=socks[0], announce=announce, stop=stop, siblings=siblings, crew=crew)


async def serve(
    frontend: Frontend,
    config: ServerConfig,
    *,
    sock: socket.socket | None = None,
    announce: Callable[[str], None] = print,
    stop: Stop | None = None,
    siblings: SiblingProcesses | None = None,
    crew: Crew | None = None,
    through: Path | None = None,
) -> None:
    """Serve until the first stop signal, then finish requests in flight, for `shutdown_timeout_s` at most.

    A second signal ends at once. The caller closes the engine, unless it hangs.

    Args:
        sock: bound already; closed at the end.
        announce: called with the server's address once it is ready.
        stop: listens to signals already; by default this function listens.
        siblings: the other API processes, if there are several.
        crew: the same, in the process that starts and ends them.
        through: a socket file on which the process in front of several servers sends requests (`siblings/link.py`).

    Raises:
        ConfigError: the address is not available.
        EngineDeadError: the engine has died; pending requests have been answered with an error.
        CrewError: the other processes can't be kept running.
    """
    if stop is None:
        with Stop().listening() as stop:
            await serve(frontend, config, sock=sock, announce=announce, stop=stop)
        return
    lifecycle = Lifecycle(siblings.board if siblings else None)
    async with AsyncExitStack() as stack:
        traces = await stack.enter_async_context(tracing(config, frontend.info.name))
        app = create_app(frontend, config, lifecycle=lifecycle, siblings=siblings, crew=crew, traces=traces)
        stack.enter_context(silent_access(config.disable_access_log_for_endpoints))
        bound = stack.enter_context(sock or bind(config))
        if siblings is not None:
            await stack.enter_async_context(listening(app.state.private, siblings.path(siblings.index)))
        if through is not None:
            await stack.enter_async_context(listening(app, through))
        metrics: Metrics = app.state.metrics
        server = HttpServer(http_settings(app, config, metrics.http.count_unread))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        leads = siblings is None or siblings.leads
        run = _Run(frontend, config, lifecycle, app.state.batches, stop, server, serving, crew=crew, leads=leads)
        try:
            await run.start()
            if not stop.first.is_set() and not run.lost.is_set():
                announce(_ready_line(frontend, config, bound))
            await run.finish()
        finally:
            await run.close()


@dataclass(slots=True)
class _Run:
    """A server from its first connection to its last, with the tasks beside it.

    Attributes:
        serving: the task of `server`.
        crew: the other API processes, if this process starts them.
        leads: this process holds the state that can exist only once.
        lost: set once the engine has died.
    """

    frontend: Frontend
    config: ServerConfig
    lifecycle: Lifecycle
    batches: BatchService
    stop: Stop
    server: HttpServer
    serving: asyncio.Task[None]
    crew: Crew | None
    leads: bool
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    _beside: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Wait until the server listens, and the other processes too. A stop or the engine's death ends the wait."""
        stats_interval = 0 if self.config.disable_log_stats or not self.leads else self.config.log_stats_interval_s
        self._run_beside(log_stats(self.frontend.engine.stats, stats_interval))
        if self.leads:
            self._run_beside(_watch_for_death(self.frontend, self.lost))
        await self._until(self.server.ready)
        if self.crew is not None:
            self.crew.accept = self.server.accept
        if self.leads:
            await self.batches.start()
        ssl = self.server.config.ssl
        if self.config.enable_ssl_refresh and ssl is not None:
            self._run_beside(refresh(ssl, self.config))
        if self.crew is not None:
            await self._until(self.crew.ready, self.crew.failed, self.lost, self.stop.first)
            self.crew.check()

    async def finish(self) -> None:
        """Serve until a stop or the engine's death, then end in order.

        Raises:
            EngineDeadError: the engine has died.
            CrewError: the other processes can't be kept running.
        """
        await self._until(self.stop.first, self.lost, *([self.crew.failed] if self.crew else ()))
        if self.lost.is_set():
            await wait_any(self.stop.first, timeout=_LAST_WORDS_S)
        await self._wind_down()
        self.server.should_exit = True
        self.server.force_exit = self.stop.second.is_set()
        await self.serving
        if self.lost.is_set() and not self.stop.first.is_set():
            raise EngineDeadError(self.frontend.engine.health().reason)
        if self.crew is not None:
            self.crew.check()

    async def close(self) -> None:
        """End every task, also after an error."""
        await self.batches.stop()
        for task in (*self._beside, self.serving):
            task.cancel()
        await asyncio.wait([*self._beside, self.serving])

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        self._beside.append(asyncio.create_task(work))

    async def _until(self, *events: asyncio.Event) -> None:
        """Wait for the first of `events`. If the server ends first, return or raise its error."""
        waiting = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait({self.serving, *waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
        if self.serving.done():
            self.serving.result()

    async def _wind_down(self) -> None:
        """Refuse new requests, and let those in flight finish, here and in the other processes."""
        self.lifecycle.drain()
        if self.crew is not None:
            self.crew.stop()
        await self.batches.stop()
        await _drain(self.frontend, self.lifecycle, self.config, self.stop)
        if self.crew is not None:
            await _follow(self.crew, self.stop)


async def _watch_for_death(frontend: Frontend, lost: asyncio.Event) -> None:
    """Set `lost` once the engine has died: the server then ends, so that its supervisor can restart it."""
    while not frontend.engine.health().final:
        await asyncio.sleep(_LOOK_S)
    lost.set()


async def _drain(frontend: Frontend, lifecycle: Lifecycle, config: ServerConfig, stop: Stop) -> None:
    if lifecycle.inflight:
        logger.info(
            "Stopping: %d requests in flight have %.0f s to finish; another SIGTERM or SIGINT ends them now.",
            lifecycle.inflight,
            config.shutdown_timeout_s,
        )
    await wait_any(lifecycle.idle, stop.second, timeout=config.shutdown_timeout_s)
    if lifecycle.idle.is_set():
        return
    logger.warning("Stopping: %d requests did not finish and are aborted.", lifecycle.inflight)
    for request_id in sorted(lifecycle.active):
        await frontend.abort(request_id)
    if not stop.second.is_set():
        await wait_any(lifecycle.idle, stop.second, timeout=_AFTER_ABORT_S)
    if not lifecycle.idle.is_set():  # a working engine reports their ends within one step
        await wait_any(lifecycle.idle, timeout=_AT_ONCE_S)
    if not lifecycle.idle.is_set():
        logger.warning("Stopping: the engine did not end %d requests; they end with an error.", lifecycle.inflight)
        await frontend.engine.close()
        await wait_any(lifecycle.idle, timeout=_AFTER_ABORT_S)


async def _follow(crew: Crew, stop: Stop) -> None:
    """Wait until the other processes have finished; they have the same time limits."""
    if not stop.second.is_set():
        await wait_any(crew.ended, stop.second, timeout=crew.patience_s)
    if stop.second.is_set():
        crew.stop()


def _ready_line(frontend: Frontend, config: ServerConfig, sock: socket.socket) -> str:
    url = base_url(config, sock)
    model = config.model_names(frontend.info.name)[0]
    curl = curl_example(url + config.root, model, frontend, needs_key=bool(config.api_keys), uds=config.uds)
    has_page = config.uds is None and config.enable_docs and frontend.why_no_chat() is None
    hint = "Talk to it there in a browser, or try:" if has_page else "Try it:"
    return f"The server is ready at {config.uds or url} and serves {model}. {hint}\n  {curl}"
