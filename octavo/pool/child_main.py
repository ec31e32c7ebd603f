"""The server process of one model: a whole server on a socket file, with a second socket for the front process."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import OctavoError
from octavo.core.garbage import seldom_collecting
from octavo.core.memory import check_address_space, memory_errors
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.terminal import say
from octavo.engine.process import die_with_parent
from octavo.server.process.log import log_to
from octavo.server.process.run import loop_factory, raise_open_files
from octavo.server.process.serving import serve
from octavo.server.process.stop import Stop
from octavo.server.siblings.link import listening
from octavo.text.frontend import Frontend

OpenFrontend = Callable[[EngineConfig, ServerConfig], AbstractAsyncContextManager[Frontend]]

logger = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True)
class Charge:
    """The arguments of the process.

    Attributes:
        server: listens on a socket file.
        requests: a socket file for requests from the front process.
        commands: a socket file for its commands.
    """

    engine: EngineConfig
    server: ServerConfig
    requests: Path
    commands: Path


class Facts(msgspec.Struct, frozen=True):
    """What the process reports when it is ready, as a line of JSON on standard output.

    Attributes:
        accelerator, max_model_len, tasks: as in `ModelInfo`.
    """

    accelerator: str
    max_model_len: int
    tasks: list[str]


def main(open_frontend: OpenFrontend) -> int:
    """Read a `Charge` from standard input and serve until a signal. Return the exit status."""
    die_with_parent()
    charge: Charge = pickle.loads(sys.stdin.buffer.read())
    try:
        log_to(charge.server)
        check_address_space()
        raise_open_files()
        with memory_errors(), asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_run(charge, open_frontend))
    except OctavoError as exc:
        say(f"error: {exc}")
        return 1


async def _run(charge: Charge, open_frontend: OpenFrontend) -> int:
    with Stop().listening() as stop:
        stop.loading = asyncio.current_task()
        try:
            async with open_frontend(charge.engine, charge.server) as frontend:
                stop.loading = None
                await _serve(charge, frontend, stop)
        except asyncio.CancelledError:
            if not stop.first.is_set():
                raise
            return 128 + stop.number
    return 0


async def _serve(charge: Charge, frontend: Frontend, stop: Stop) -> None:
    def ready(_: str) -> None:
        info = frontend.info
        facts = Facts(info.accelerator, info.max_model_len, info.tasks)
        os.write(sys.stdout.fileno(), msgspec.json.encode(facts) + b"\n")

    with seldom_collecting():
        async with listening(commands(frontend), charge.commands):
            await serve(frontend, charge.server, announce=ready, stop=stop, through=charge.requests)


def commands(frontend: Frontend) -> Starlette:
    """Return the application that carries out the front process's commands: POST /sleep and /wake_up."""

    async def sleep(request: Request) -> Response:
        return await _told(frontend.engine.sleep(1, PauseMode.WAIT))

    async def wake_up(request: Request) -> Response:
        return await _told(frontend.engine.wake_up(tuple(SleepTag)))

    return Starlette(routes=[Route("/sleep", sleep, methods=["POST"]), Route("/wake_up", wake_up, methods=["POST"])])


async def _told(work: Awaitable[None]) -> Response:
    try:
        await work
    except OctavoError as exc:
        return Response(str(exc), 409)
    return Response()
