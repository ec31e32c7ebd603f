"""`Crew`: the API processes other than the first one, which starts, watches and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily

from octavo.config import ServerConfig
from octavo.core.errors import ConfigError, OctavoError
from octavo.engine.client import CoreClient
from octavo.engine.socket_folder import SocketFolder
from octavo.server.metrics.merge import Families, decode, lasting, total
from octavo.server.process.address import check_alone
from octavo.server.siblings.link import ask
from octavo.server.siblings.siblings import SiblingProcesses
from octavo.text.frontend import Frontend, Twin

logger = logging.getLogger("octavo.server")

OWN_METRICS = "/own/metrics"
_MODULE = "octavo.server.siblings.main"
_POLL_S = 0.05
_ANSWER_S = 2.0
_LOOK_S = 5.0
_END_S = 5.0
_MOST_DEATHS, _DEATHS_WITHIN_S = 3, 300.0

Accept = Callable[[socket.socket], Awaitable[asyncio.Server]]
"""Accepts a listening socket's connections here until the returned server is closed; the socket stays open."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The arguments of one process of the crew.

    Attributes:
        folder: see `SiblingProcesses`.
        core_address, core_pid: the engine core.
        twin: creates its front end.
        listens: file descriptor of its listening socket.
    """

    index: int
    count: int
    folder: Path
    core_address: str
    core_pid: int
    twin: Twin
    config: ServerConfig
    listens: int


class CrewError(OctavoError):
    """The API processes can't be kept running."""


class Crew:
    """Starts and supervises the processes.

    Args:
        siblings: the first process's view.
        charges: the arguments of each process.
        socks: their listening sockets, if each has its own. Kept open here, so that no connection is refused while a
            process is restarted; closed once it has ended for good.
        patience_s: maximum seconds to finish after a stop request.

    Attributes:
        accept: takes over the socket of a process that has died until its replacement is ready; None before this
            process serves.
        ready: each process has been ready once.
        failed: they can't be kept running; see `check`.
        ended: all have ended, after `stop`.
        restarts: number of restarts of processes that had died.
    """

    def __init__(
        self,
        siblings: SiblingProcesses,
        charges: Sequence[Charge],
        socks: Mapping[int, socket.socket],
        patience_s: float,
    ) -> None:
        self.siblings = siblings
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.ended = asyncio.Event()
        self.restarts = 0
        self.patience_s = patience_s
        self.accept: Accept | None = None
        self._charges = charges
        self._socks = socks
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._standing_in: dict[int, asyncio.Server] = {}
        self._known: dict[int, Families] = {}
        self._departed: Families = []
        self._reason = ""
        self._ending = False
        self._minded = len(charges)
        self._unready = {charge.index for charge in charges}
        self._minders = [asyncio.create_task(self._mind(charge)) for charge in charges]

    def check(self) -> None:
        """Check the processes.

        Raises:
            CrewError: they can't be kept running; the text gives the reason.
        """
        if self.failed.is_set():
            raise CrewError(self._reason)

    def stop(self) -> None:
        """Ask all processes to finish; when called again, to end at once."""
        self._ending = True
        for child in self._children.values():
            if child.stdin is not None and not child.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.write(b".")
                    child.stdin.flush()

    async def close(self) -> None:
        """End the remaining processes, gracefully if possible."""
        self.stop()
        await asyncio.wait(self._minders, timeout=_END_S)
        for child in self._children.values():
            child.kill()
        await asyncio.wait(self._minders)

    async def metrics(self) -> list[Families]:
        """Return the metrics of the other processes, including those that have ended."""
        await asyncio.gather(*(self._answers(charge.index, _ANSWER_S) for charge in self._charges))
        restarts = CounterMetricFamily("octavo:api_process_restarts", "API processes that died and were started again.")
        restarts.add_metric([], self.restarts)
        return [self._departed, *self._known.values(), [restarts]]

    async def _mind(self, charge: Charge) -> None:
        """Keep one process running until the crew is stopped."""
        try:
            await self._keep_up(charge)
        except OSError as exc:
            self._fail(f"API process {charge.index} can't be started: {exc.strerror or exc}.")
        finally:
            self._stand_down(charge.index)
            if charge.index in self._socks:
                self._socks[charge.index].close()
            self._minded -= 1
            if not self._minded:
                self.ended.set()

    async def _keep_up(self, charge: Charge) -> None:
        deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        while not self._ending:
            child = self._children[charge.index] = _spawn(charge)
            if await _says_ready(child):
                self._note_ready(charge.index)
            watching = asyncio.create_task(self._watch(charge, child))
            await _gone(child)
            watching.cancel()
            self._lose(charge.index)
            if self._ending:
                return
            deaths.append(time.monotonic())
            how = f"API process {charge.index} {_how_ended(child.returncode)}"
            if charge.index in self._unready and child.returncode >= 0:  # it would fail again
                self._fail(f"{how} before it was ready; see its log lines.")
                return
            if len(deaths) == _MOST_DEATHS and deaths[-1] - deaths[0] < _DEATHS_WITHIN_S:
                self._fail(f"{how}, {_MOST_DEATHS} times within {_DEATHS_WITHIN_S:.0f} s; the server stops.")
                return
            await self._stand_in(charge.index)
            self.restarts += 1
            logger.error("%s; its requests are lost, and it is restarted.", how)

    def _note_ready(self, index: int) -> None:
        self._stand_down(index)
        self._unready.discard(index)
        if not self._unready:
            self.ready.set()

    async def _stand_in(self, index: int) -> None:
        """Accept connections here for a process that has died, including those already queued."""
        sock = self._socks.get(index)
        if sock is not None and self.accept is not None and index not in self._standing_in:
            self._standing_in[index] = await self.accept(sock)

    def _stand_down(self, index: int) -> None:
        server = self._standing_in.pop(index, None)
        if server is not None:
            server.close()

    async def _watch(self, charge: Charge, child: subprocess.Popen[bytes]) -> None:
        """Kill a process that is alive but unresponsive: it would continue to get its share of connections.

        It is asked twice, because this process may have been the one that was blocked.
        """
        patience_s = charge.config.stall_after_s
        while await self._answers(charge.index, patience_s) or await self._answers(charge.index, _ANSWER_S):
            await asyncio.sleep(min(_LOOK_S, patience_s))
        if not self._ending:
            logger.error("API process %d has answered nothing for %.0f s.", charge.index, patience_s)
            child.kill()

    async def _answers(self, index: int, patience_s: float) -> bool:
        """Ask for the process's metrics and keep them; return False if it is alive but does not respond."""
        try:
            async with asyncio.timeout(patience_s):
                status, body = await ask(self.siblings.path(index), "GET", OWN_METRICS)
        except TimeoutError:
            return False
        except ConnectionError:
            return True  # it is starting or has ended
        if status == 200:
            self._known[index] = decode(body)
        return True

    def _lose(self, index: int) -> None:
        """Drop the state of a process that has died; its counters stay."""
        self.siblings.board.clear(index)
        self._departed = total([self._departed, lasting(self._known.pop(index, []))])

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._ending = True
        self.failed.set()


def _spawn(charge: Charge) -> subprocess.Popen[bytes]:
    """Start `octavo.server.siblings.main`, with its arguments on standard input; a byte there later asks it to stop."""
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(charge.listens,)
    )
    data = pickle.dumps(charge)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(len(data).to_bytes(8) + data)
        child.stdin.flush()
    return child


async def _says_ready(child: subprocess.Popen[bytes]) -> bool:
    """Wait until the process reports that it is ready; return False if it ends first."""
    assert child.stdout is not None
    loop, descriptor = asyncio.get_running_loop(), child.stdout.fileno()
    said = asyncio.Event()
    loop.add_reader(descriptor, said.set)
    try:
        await said.wait()
    finally:
        loop.remove_reader(descriptor)
    return bool(os.read(descriptor, 1))


async def _gone(child: subprocess.Popen[bytes]) -> None:
    """Wait for the process's end, and close its pipes."""
    while child.poll() is None:
        await asyncio.sleep(_POLL_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _how_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


@asynccontextmanager
async def leading(frontend: Frontend, config: ServerConfig, socks: Sequence[socket.socket]) -> AsyncIterator[Crew]:
    """Run the other API processes of a server for the time of the block; this process is the first.

    Args:
        socks: the listening sockets: one each, or one for all; this process has the first.

    Raises:
        ConfigError: another server listens on the address.
    """
    check_alone(config, socks[0])
    engine, twin = frontend.engine, frontend.twin
    if not isinstance(engine, CoreClient) or twin is None:
        raise ConfigError(
            "--api-server-count needs one engine core in a separate process; leave it or --data-parallel-size out."
        )
    count = config.api_server_count
    folder = SocketFolder()
    charges = [
        Charge(
            index=index,
            count=count,
            folder=folder.path,
            core_address=engine.process.address,
            core_pid=engine.process.pid,
            twin=twin,
            config=config,
            listens=socks[index % len(socks)].fileno(),
        )
        for index in range(1, count)
    ]
    patience_s = config.shutdown_timeout_s + _END_S
    own = dict(enumerate(socks)) if len(socks) > 1 else {}
    crew = Crew(SiblingProcesses(0, count, folder.path), charges, own, patience_s)
    try:
        yield crew
    finally:
        await crew.close()
        folder.remove()
