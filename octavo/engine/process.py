"""`CoreProcess`: an engine core's process, from its start to its certain end."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from octavo.engine.connections import listen_at
from octavo.engine.socket_folder import SocketFolder

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_GRACE_S = 5.0
_STACKS = signal.SIGUSR1
_POLL_S = 0.1
_ENVIRONMENT = {
    # A compute thread that spins while it waits takes the core from whoever it waits for; read when torch loads.
    "GOMP_SPINCOUNT": "0",
    # What was needed to load the weights goes back to the system at once; read by the C library (glibc's mallopt(3)).
    # `keep_freed_memory` ends it.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    # numpy multiplies nothing here, and its threads would each keep a buffer.
    "OPENBLAS_NUM_THREADS": "1",
}


class CoreProcess:
    """A child that runs `python -m MODULE`, reads `payload` from its standard input, and can't outlive this process."""

    def __init__(self, module: str, payload: Any) -> None:
        self._folder = SocketFolder()
        self.address = str(self._folder.path / "core.sock")
        with listen_at(self.address) as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                env={**_ENVIRONMENT, **os.environ},
                pass_fds=(listener.fileno(),),
                process_group=0,  # out of a terminal's Ctrl-C, and one group with the compilers that it starts
            )
            stdin = self._process.stdin
            if stdin is None:
                raise AssertionError("the child has no standard input")
            with stdin:
                pickle.dump((listener.fileno(), payload), stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def exited(self) -> None:
        """Return soon after the process has ended."""
        while self.alive:
            await asyncio.sleep(_POLL_S)

    def obituary(self) -> str:
        """How the process ended, for people."""
        code = self._process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " The system may have run out of memory." if name == "SIGKILL" else ""
            return f"The engine core was killed by {name}.{hint}"
        return f"The engine core ended with exit code {code}; its log says why."

    def show_stacks(self) -> None:
        """Have the process write what each of its threads is doing to standard error, even if it hangs."""
        if self.alive:
            self._process.send_signal(_STACKS)

    def kill(self) -> None:
        """End the process now, and what it has started."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Wait a little for the process to end by itself, then make it; also removes its socket."""
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()


class CoreElsewhere:
    """A core that another process has started and will stop; for clients that share it."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    async def exited(self) -> None:
        """Return soon after the process has ended and its parent has seen so."""
        while self.alive:
            await asyncio.sleep(_POLL_S)

    def obituary(self) -> str:
        return "The engine core has ended; the server's log says why."

    def show_stacks(self) -> None:
        """Its owner does that."""

    def stop(self) -> None:
        """Its owner does that."""


def receive_payload() -> tuple[socket.socket, Any]:
    """In the child: where front ends connect, and what `CoreProcess` was given. Ties its life to its parent's."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager sends these to all; the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(_STACKS)
    die_with_parent()
    listener, payload = pickle.load(sys.stdin.buffer)
    sys.stdin.close()
    sys.stdin = open(os.devnull)  # noqa: SIM115
    return socket.socket(fileno=listener), payload


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep_freed_memory() -> None:
    """In the child, once the model is loaded: what that left goes back to the system, and memory freed from now on is
    kept, for each step asks for the same again.

    Fetching it from the system every time costs a model that torch runs a quarter of its speed.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # only glibc has it
    if mallopt is not None:
        library.malloc_trim(0)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
