"""`RankProcess`: the child process of one rank, and `RankStart` for its side."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from octavo.core.errors import DeviceLostError
from octavo.engine import rank_wire as wire
from octavo.engine.frames import Frames
from octavo.engine.process import be_child, is_stopped, read_start
from octavo.engine.ring import RingHandles, RingReader

log = logging.getLogger(__name__)

_PIECE = 1 << 20
_GRACE_S = 5.0
_LOG_LINES = 20
_DESCRIPTORS = 4
"""Most that a rank gets: of its ring, and the memory of its group."""


class _Child:
    """A process that runs `python -m MODULE ARGUMENTS`, and waits for what a rank begins with."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.begun_as = module, tuple(arguments), dict(environment)
        self.peer, child = socket.socketpair()
        with child:
            self._descriptor = child.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(self._descriptor,),
                env=environment,
            )

    def give(self, ring: RingHandles, memory: int, payload: Any) -> None:
        """Send descriptors and payload. If the process has ended, its end is seen later."""
        descriptors = [*ring, *([memory] if memory >= 0 else [])]
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as stdin:
            pickle.dump((self._descriptor, payload), stdin)
            socket.send_fds(self.peer, [b"."], descriptors)

    def discard(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stderr, self.peer):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self.process.wait()


class EarlyRanks:
    """Processes of ranks that are started before all that they need is known, so that they import it meanwhile. Those
    that no `RankProcess` has taken are ended at the exit.

    Args:
        environments: of each process, the variables that differ from this process's.
    """

    def __init__(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        self.waiting = [_Child(module, arguments, {**os.environ, **environment}) for environment in environments]

    def __enter__(self) -> EarlyRanks:
        return self

    def __exit__(self, *exc: object) -> None:
        while self.waiting:
            self.waiting.pop().discard()

    def take(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> _Child:
        """Return a waiting process that was begun in the same way, or a new one."""
        begun_as = module, tuple(arguments), dict(environment)
        for child in self.waiting:
            if child.begun_as == begun_as:
                self.waiting.remove(child)
                return child
        if self.waiting:
            *_, before = self.waiting[0].begun_as
            changed = sorted({name for name, _ in before.items() ^ environment.items()})
            log.info("started a rank anew, since one started early has other settings: %s", ", ".join(changed))
        return _Child(*begun_as)


class RankProcess:
    """A child that runs `python -m MODULE ARGUMENTS`, reads its ring, socket and `payload`, and serves a rank.

    Messages come to it through the ring, its answers through the socket. Its standard error is forwarded, each line
    after `prefix`, and the last lines are kept for the error if it ends.

    Attributes:
        number: the rank's number.
        device: its device's name; "" until it is known.
    """

    def __init__(
        self,
        module: str,
        payload: Any,
        ring: RingHandles,
        *,
        number: int = 0,
        prefix: str = "",
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
        memory: int = -1,
        early: EarlyRanks | None = None,
    ) -> None:
        """
        Args:
            environment: variables that differ from this process's.
            memory: a descriptor that the child gets, too; -1 for none.
            early: processes that wait; the child is one of them, if one was begun in this way.
        """
        self.number = number
        self.device = ""
        self._prefix = prefix
        begin = _Child if early is None else early.take
        child = begin(module, arguments, {**os.environ, **(environment or {})})
        self._peer, self._process = child.peer, child.process
        child.give(ring, memory, payload)
        assert self._process.stderr is not None
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._relay = threading.Thread(target=self._pass_on, args=(self._process.stderr,), daemon=True)
        self._relay.start()
        self._listener: threading.Thread | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def listen(self, take: Callable[[int, wire.FromRank], None], ended: Callable[[int, str], object]) -> None:
        """Deliver messages in a thread: each to `take`, with the rank's number; at last the reason of the process's
        end to `ended`."""

        def run() -> None:
            frames = Frames()
            try:
                while data := self._peer.recv(_PIECE):
                    for message in frames.take(data):
                        take(self.number, wire.decode_from_rank(message))
            except OSError:
                log.debug("the socket of rank %d was closed", self.number)
            ended(self.number, self._end())

        self._listener = threading.Thread(target=run, name=f"octavo-rank-{self.number}", daemon=True)
        self._listener.start()

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log."""
        return list(self._lines)

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process (Linux only)."""
        return is_stopped(self.pid)

    def lost(self, reason: str) -> DeviceLostError:
        """Return the error for this rank's loss, with its last log lines."""
        where = f"rank {self.number}" + (f" ({self.device})" if self.device else "")
        return DeviceLostError(where, reason, tuple(self._lines))

    def hang_up(self) -> None:
        """Close the socket's sending end, which ends the process."""
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def wait(self) -> None:
        """Wait for the process's end; kill it if it does not end in time."""
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("rank %d did not end within %.0f s and is killed", self.number, _GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process if it has not ended, and wait for its end."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._listener is not None:
            self._listener.join(_GRACE_S)
        self._relay.join(_GRACE_S)
        self._peer.close()

    def _end(self) -> str:
        """Wait for the process's end and return how it ended."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "its process closed its socket"
        self._relay.join(_GRACE_S)
        return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended ({code})"

    def _pass_on(self, source: IO[bytes]) -> None:
        with source:
            for line in source:
                text = line.decode(errors="replace")
                self._lines.append(text.rstrip("\n"))
                with contextlib.suppress(OSError, ValueError):  # a full disk, or a reader that is gone: read on
                    sys.stderr.write(self._prefix + text)
                    sys.stderr.flush()


class RankStart:
    """What `RankProcess` gives to a child, which makes this first of all. It is read in a thread, so that the engine
    need not wait until the child has imported what it needs.

    Makes the child ignore `GROUP_SIGNALS`, and end with its parent.
    """

    def __init__(self) -> None:
        be_child()
        self._read = ThreadPoolExecutor(1, thread_name_prefix="octavo-start")
        self._data = self._read.submit(read_start)

    def receive(self) -> tuple[socket.socket, RingReader, Any, int]:
        """Wait for it; return the socket to the engine, the ring of its messages, the payload, and the memory, or
        -1."""
        with self._read:
            descriptor, payload = pickle.loads(self._data.result())
        peer = socket.socket(fileno=descriptor)
        _, descriptors, _, _ = socket.recv_fds(peer, 1, _DESCRIPTORS)
        memory = descriptors[3] if len(descriptors) == _DESCRIPTORS else -1
        return peer, RingReader(RingHandles(*descriptors[:3])), payload, memory
