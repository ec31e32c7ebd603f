"""The life of the server: bind, open the engine, serve, shut down."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.garbage import seldom_collecting
from octavo.core.memory import memory_errors
from octavo.core.terminal import say
from octavo.server.fingerprint import check_fingerprint
from octavo.server.middleware import load_middleware
from octavo.server.process.address import bind_all, release
from octavo.server.process.keys import with_key_file
from octavo.server.process.log import log_to
from octavo.server.process.stop import Stop
from octavo.server.process.tls import check_tls
from octavo.server.tracing.start import check_traces

if TYPE_CHECKING:
    from octavo.text.frontend import Frontend

logger = logging.getLogger("octavo.server")

OpenFrontend = Callable[[], AbstractAsyncContextManager["Frontend"]]
Announce = Callable[[str], None]
Lead = Callable[["Frontend", ServerConfig, list[socket.socket], Announce, Stop], Awaitable[None]]


_OPEN_FILES = 65_536
_FEW_FILES = 1024


def run_server(open_frontend: OpenFrontend, config: ServerConfig, *, announce: Announce = print) -> int:
    """Bind, open the engine, and serve until a signal. Return the process's exit status.

    Args:
        open_frontend: starts the engine when entered and closes it when left.
        announce: called with the server's address once it is ready.
    """
    try:
        config = prepared(config)
        with ExitStack() as stack:
            stack.enter_context(memory_errors())
            socks = [stack.enter_context(sock) for sock in bind_all(config)]
            stack.callback(release, config)
            runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
            return runner.run(_run(open_frontend, config, socks, announce))
    except OctavoError as exc:
        say(f"error: {exc}")
        return 1


def prepared(config: ServerConfig) -> ServerConfig:
    """Check the settings before anything is loaded, and set up the log. Return them with the keys of the key file.

    Raises:
        ConfigError: they contradict each other, or a file or module that they name can't be used.
    """
    config.check()
    log_to(config)
    raise_open_files()
    config = with_key_file(config)
    check_tls(config)
    check_fingerprint(config)
    load_middleware(config.middleware)
    check_traces(config)
    check_jobs_dir(config)
    return config


async def _run(
    open_frontend: OpenFrontend, config: ServerConfig, socks: list[socket.socket], announce: Announce
) -> int:
    with Stop().listening() as stop:
        stop.loading = asyncio.current_task()
        # While the engine's process imports and loads, another core is free for ours.
        importing = asyncio.create_task(asyncio.to_thread(_import_lead))
        importing.add_done_callback(_retrieve)
        try:
            async with open_frontend() as frontend:
                lead = await importing
                stop.loading = None
                with seldom_collecting():
                    await lead(frontend, config, socks, announce, stop)
        except asyncio.CancelledError:
            if not stop.first.is_set():
                raise
            say("stopped before the server was ready.")
            return 128 + stop.number
    return 0


def _retrieve(task: asyncio.Task[Lead]) -> None:
    """Retrieve a failed import's exception, so that it is not logged in addition to the engine's error, which comes
    first."""
    if not task.cancelled():
        task.exception()


def _import_lead() -> Lead:
    from octavo.server.process.serving import lead

    return lead


def check_jobs_dir(config: ServerConfig) -> None:
    """Check the folder for files and batches.

    Raises:
        ConfigError: it can't be written to.
    """
    if config.jobs_dir is None:
        return
    folder = Path(config.jobs_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as exc:
        reason = exc.strerror or exc
        raise ConfigError(
            f"--jobs-dir {folder} can't be used ({reason}); give a folder that can be written to."
        ) from exc


def raise_open_files() -> None:
    """Raise the limit of open files: connections beyond it (usually 1,024) would be dropped silently."""
    try:
        import resource
    except ImportError:  # no such limits on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if wanted < _FEW_FILES:
        text = "Only %d files may be open at once (ulimit -n): further connections are dropped."
        logger.warning(text, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not available on Windows
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
