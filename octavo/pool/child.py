"""`Child`: the process of one model, seen from the front process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import OctavoError
from octavo.pool.child_main import Charge, Facts
from octavo.server.siblings.link import ask

_ANSWER_S = 2.0
_STOP_S = 15.0
_HEIRS_S = 5.0
_ENDING_S = 6.0
_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_LOOK_S = 0.1
_MOST_LINES = 20


class ChildError(OctavoError):
    """A model's process did not start, or did not do what it was told; the text gives the reason."""


class Child:
    """A running process. Make one with `start`.

    Attributes:
        facts: what it reported when it was ready.
        requests: the socket file for requests.
        ended: set once the process has ended.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, charge: Charge) -> None:
        self.facts = Facts("", 0, [])
        self.requests = charge.requests
        self.ended = asyncio.Event()
        self._name = name
        self._process = process
        self._commands = charge.commands
        self._last: deque[str] = deque(maxlen=_MOST_LINES)
        self._reading = asyncio.create_task(self._relay_log())
        self._waiting = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], engine: EngineConfig, server: ServerConfig, folder: Path, key: str
    ) -> Child:
        """Start a process and wait until it is ready. If the wait is cancelled, the process is killed.

        Args:
            command: runs `child_main.main`.
            server: listens on a socket file.
            folder: for the socket files, whose names begin with `key`.

        Raises:
            ChildError: it ended before it was ready.
        """
        charge = Charge(engine, server, folder / f"{key}.req", folder / f"{key}.cmd")
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, so that a signal from the terminal reaches only the front process, which decides.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        child = cls(name, process, charge)
        try:
            await child._hand_over(charge)
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def how_ended(self) -> str:
        """Return how the process ended, and the reason if its log has one."""
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        said = next((line for line in reversed(self._last) if "error: " in line), "")
        return f"{how}: {said.partition('error: ')[2]}" if said else how

    async def ending(self) -> None:
        """Wait a moment for the end of a process that no longer answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDING_S):
                await self.ended.wait()

    async def told(self, url: str) -> bytes | None:
        """Return the answer to a GET; None if there is none soon, or one other than 200."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, body = await ask(self.requests, "GET", url)
        except (ConnectionError, TimeoutError):
            return None
        return body if status == 200 else None

    async def load(self) -> int:
        """Return the number of sequences running or waiting.

        Raises:
            ConnectionError: the process has ended.
        """
        status, body = await ask(self.requests, "GET", "/load")
        return int(msgspec.json.decode(body)["server_load"]) if status == 200 else 0

    async def drained(self) -> None:
        """Wait until the model computes nothing, such as a response in the background, or the process has ended."""
        with contextlib.suppress(ConnectionError):
            while await self.load():
                await asyncio.sleep(_LOOK_S)

    async def trouble(self, patience_s: float) -> str:
        """Return why the process is not healthy, as it says itself or since it does not answer; "" if it is."""
        try:
            async with asyncio.timeout(patience_s):
                status, body = await ask(self.requests, "GET", "/health")
        except TimeoutError:
            return f"its process has answered nothing for {patience_s:.0f} s"
        except ConnectionError:
            return ""  # `ended` says the rest
        return "" if status == 200 else str(msgspec.json.decode(body)["error"]["message"])

    async def command(self, name: str) -> None:
        """Carry out "sleep" or "wake_up".

        Raises:
            ChildError: it failed.
        """
        try:
            status, body = await ask(self._commands, "POST", f"/{name}")
        except ConnectionError as exc:
            raise ChildError(str(exc)) from exc
        if status != 200:
            raise ChildError(body.decode(errors="replace"))

    async def stop(self) -> None:
        """End the process: by a signal, and if that takes too long by force. Its requests are aborted."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.ended.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End the process and what it has started at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await self.ended.wait()

    async def _hand_over(self, charge: Charge) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(pickle.dumps(charge))
            await stdin.drain()
            stdin.close()
        line = await stdout.readline()
        if not line:
            await self.ended.wait()
            raise ChildError(self.how_ended())
        self.facts = msgspec.json.decode(line, type=Facts)

    async def _wait(self) -> None:
        await self._process.wait()
        # It ends once every process that has inherited the pipe has ended, the engine's too, and its memory is free.
        await asyncio.wait({self._reading}, timeout=_HEIRS_S)
        self._reading.cancel()
        self.ended.set()

    async def _relay_log(self) -> None:
        """Write the process's lines to standard error, with the model's name."""
        stderr = self._process.stderr
        assert stderr is not None
        rest = b""
        while data := await stderr.read(_CHUNK):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            self._write(lines)
        self._write([rest] if rest else [])

    def _write(self, lines: Sequence[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        self._last.extend(texts)
        with contextlib.suppress(OSError):  # a full disk or a closed terminal
            sys.stderr.write("".join(f"[{self._name}] {text}\n" for text in texts))
            sys.stderr.flush()
