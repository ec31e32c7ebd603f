"""`run_node`: the ranks of a machine whose engine runs on another one (`--node-rank` above 0)."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from octavo.core.errors import ConfigError, DeviceLostError
from octavo.core.worker_info import RankPlace
from octavo.engine import node_wire, rank_wire
from octavo.engine.rank_process import RankProcess
from octavo.engine.ring import RingHandles, RingWriter

log = logging.getLogger(__name__)

_PIECE = 1 << 20
_RETRY_S = 0.5

StartRank = Callable[[RankPlace, RingHandles], RankProcess]


def run_node(
    ranks: Sequence[int], address: tuple[str, int], settings: str, start: StartRank, patience_s: float = 600.0
) -> int:
    """Run these ranks until the engine ends.

    Args:
        address: of the engine's machine (`NodeListener`).
        settings: digest of what must be equal on all machines.
        start: starts a rank's process.
        patience_s: how long to try to reach the engine.

    Returns:
        The exit code: 0 if the engine ended, 1 if a rank did.

    Raises:
        ConfigError: the engine can't be reached, or refuses this machine.
    """
    peers = [_join(rank, address, settings, patience_s) for rank in ranks]
    served = [_ServedRank(peer, start(place, ring.handles(0)), ring) for peer, place, ring in peers]
    threads = [threading.Thread(target=one.run, name=f"octavo-rank-{one.number}") for one in served]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(any(one.failed for one in served))


def _join(
    rank: int, address: tuple[str, int], settings: str, patience_s: float
) -> tuple[socket.socket, RankPlace, RingWriter]:
    """Offer to run a rank; return the connection, the rank's place, and a ring for its messages."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            peer, joined = _asked(address, node_wire.Join(rank, settings), patience_s)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Rank {rank} did not reach the engine at {address[0]}:{address[1]} within {patience_s:g} s "
                    f"({error}). Check --master-addr and --master-port, and that node 0 runs."
                ) from error
            time.sleep(_RETRY_S)
    if joined.place is None:
        peer.close()
        raise ConfigError(f"Node 0 refuses rank {rank}: {joined.refusal}.")
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer, joined.place, RingWriter(1)


def _asked(
    address: tuple[str, int], message: node_wire.Join, patience_s: float
) -> tuple[socket.socket, node_wire.Joined]:
    """Connect, send a message, and wait for the answer."""
    peer = socket.create_connection(address, timeout=patience_s)
    try:
        peer.sendall(node_wire.framed(message))
        return peer, node_wire.decode_joined(node_wire.read_one(peer))
    except BaseException:
        peer.close()
        raise


class _ServedRank:
    """Passes messages between the engine and a rank's process."""

    def __init__(self, peer: socket.socket, process: RankProcess, ring: RingWriter) -> None:
        self.number = process.number
        self.failed = False
        self._peer, self._process, self._ring = peer, process, ring
        self._sending = threading.Lock()
        self._closed = threading.Event()

    def run(self) -> None:
        """Return when the engine has disconnected, or the process has ended."""
        self._process.listen(self._answer, self._gone)
        beat = threading.Thread(target=self._beat, daemon=True)
        beat.start()
        try:
            while data := self._peer.recv(_PIECE):
                self._ring.write(data, self._check)
        except (OSError, DeviceLostError):
            log.debug("rank %d gets no more messages", self.number)
        self._closed.set()
        self._process.hang_up()
        self._process.wait()
        beat.join()
        self._peer.close()
        self._ring.close()

    def _check(self) -> None:
        if self._process.code is not None:
            raise self._process.lost("its process has ended")

    def _answer(self, number: int, message: rank_wire.FromRank) -> None:
        self._send(node_wire.Answer(rank_wire.encode(message)))

    def _gone(self, number: int, reason: str) -> None:
        """Tell the engine how the process ended, unless the engine ended it."""
        if not self._closed.is_set():
            self.failed = True
            self._send(node_wire.Ended(reason, self._process.last_lines))
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def _beat(self) -> None:
        stopped = 0
        while not self._closed.wait(node_wire.BEAT_S):
            stopped = stopped + 1 if self._process.stopped else 0
            if stopped > 1:
                self._gone(self.number, "its process was stopped by a signal (SIGSTOP) and does not go on")
            self._send(node_wire.Beat())

    def _send(self, message: node_wire.FromNode) -> None:
        with self._sending, contextlib.suppress(OSError):
            self._peer.sendall(node_wire.framed(message))
