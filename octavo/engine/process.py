"""`CoreProcess`: start an engine core's process, and make sure that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.engine.connections import listen_at
from octavo.engine.socket_folder import SocketFolder

_SWITCH_INTERVAL_S = 0.0005
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_GRACE_S = 5.0
_STACKS = signal.SIGUSR1
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a whole process group."""
_POLL_S = 0.1
_ENVIRONMENT = {
    # Compute threads must not spin while they wait, which takes CPU time from other threads. Read when torch loads.
    "GOMP_SPINCOUNT": "0",
    # Return memory used to load the weights to the system at once. Read by the C library (glibc's mallopt(3));
    # `keep_freed_memory` reverts it.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 << 10),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 10),
    # numpy does no matrix products here, and each of its threads would keep a buffer.
    "OPENBLAS_NUM_THREADS": "1",
}


class CoreProcess:
    """A child that runs `python -m MODULE`, reads `payload` from its standard input, and can't outlive this process."""

    def __init__(self, module: str, payload: Any, environment: Mapping[str, str] | None = None) -> None:
        """
        Args:
            environment: variables that differ from this process's.
        """
        self._folder = SocketFolder()
        self.address = str(self._folder.path / "core.sock")
        with listen_at(self.address) as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                env={**_ENVIRONMENT, **os.environ, **(environment or {})},
                pass_fds=(listener.fileno(),),
                process_group=0,  # no Ctrl-C from the terminal, and one group with the compilers that it starts
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
        """Return how the process ended, for display."""
        code = self._process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " The system may have run out of memory." if name == "SIGKILL" else ""
            return f"The engine core was killed by {name}.{hint}"
        return f"The engine core ended with exit code {code}; its log says why."

    def show_stacks(self) -> None:
        """Make the process write its threads' stacks to standard error, even if it hangs."""
        if self.alive:
            self._process.send_signal(_STACKS)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # another thread has just seen its end
                os.killpg(self.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Wait a few seconds for the process to end, else kill it. Remove its socket."""
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.remove()


class CoreElsewhere:
    """A core that another process starts and stops; for clients that share it."""

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
        """Return soon after the process has ended and its parent has collected its exit status."""
        while self.alive:
            await asyncio.sleep(_POLL_S)

    def obituary(self) -> str:
        return "The engine core has ended; the server's log says why."

    def show_stacks(self) -> None:
        """Do nothing: the owner does it."""

    def stop(self) -> None:
        """Do nothing: the owner does it."""


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped a process (Linux only)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def receive_payload() -> tuple[socket.socket, Any]:
    """Call in the child: return the listening socket and the payload of `CoreProcess`.

    Also makes the child ignore `GROUP_SIGNALS`, and end with its parent.
    """
    listener, payload = receive_start()
    return socket.socket(fileno=listener), payload


def be_child() -> None:
    """Call in a child: ignore `GROUP_SIGNALS`, and end with the parent."""
    for number in GROUP_SIGNALS:  # service managers and terminals signal all processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(_STACKS)
    die_with_parent()


def receive_start() -> Any:
    """Call in a child: `be_child`, and return what its parent pickles to standard input; wait for it."""
    be_child()
    return pickle.loads(read_start())


def read_start() -> bytes:
    """Call in a child: read standard input to its end, which takes until the parent has written what it has to."""
    received = sys.stdin.buffer.read()
    sys.stdin.close()
    sys.stdin = open(os.devnull)  # noqa: SIM115
    return received


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def switch_threads_often() -> None:
    """Call in the child once the model is loaded: threads that compute in Python take turns every half millisecond.

    By default, one may keep the step loop waiting for 5 ms, which is as long as a step, or wait as long for the loop.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def keep_freed_memory() -> None:
    """Call in the child once the model is loaded: return freed memory to the system, and keep memory freed later.

    Each step allocates the same amounts again; getting them from the system costs a model run by torch a quarter of its
    speed.
    """
    library = ctypes.CDLL(None)
    mallopt = getattr(library, "mallopt", None)  # only glibc has it
    if mallopt is not None:
        library.malloc_trim(0)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 8 * _LARGEST_MMAP_THRESHOLD)
