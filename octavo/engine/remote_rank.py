"""`NodeListener` and `RemoteRank`: the engine's side of ranks on other machines. `node.py` is theirs."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from octavo.core.errors import ConfigError, DeviceLostError
from octavo.core.worker_info import RankPlace
from octavo.engine import node_wire, rank_wire
from octavo.engine.frames import Frames
from octavo.engine.ring import RingHandles, RingReader

log = logging.getLogger(__name__)

_PIECE = 1 << 20
_LOOK_MS = 200
_GRACE_S = 5.0
_FIRST_S = 10.0
_CHECK_S = 1.0
_GONE = "its node has disconnected"


class NodeListener:
    """Where the ranks of other machines arrive.

    Args:
        port: 0 for any free one.
        settings: digest of what must be equal on all machines.
        patience_s: how long to wait for a rank.
        check: raises an error if no rank will come any more; called once a second while one is waited for.

    Attributes:
        port: where it listens.

    Raises:
        ConfigError: the port is in use.
    """

    def __init__(
        self, port: int, settings: str, patience_s: float = 600.0, check: Callable[[], None] = lambda: None
    ) -> None:
        self._settings = settings
        self._check = check
        self._patience_s = patience_s
        self._arrived: dict[int, socket.socket] = {}
        try:
            self._listener = socket.create_server(("", port), backlog=128)
        except OSError as error:
            raise ConfigError(
                f"--master-port {port} can't be used ({error.strerror}); choose another one on all machines."
            ) from error

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def admit(self, number: int, place: RankPlace, node: int, ring: RingHandles) -> RemoteRank:
        """Wait for a rank's machine, and send it the rank's place.

        Raises:
            ConfigError: it did not come in time.
        """
        deadline = time.monotonic() + self._patience_s
        if number not in self._arrived:
            log.warning("waiting for node %d, which runs rank %d", node, number)
        while number not in self._arrived:
            left = deadline - time.monotonic()
            self._listener.settimeout(min(max(0.0, left), _CHECK_S))
            try:
                peer, _ = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                self._check()
                if left > _CHECK_S:
                    continue
                raise ConfigError(
                    f"Node {node} with rank {number} did not join within {self._patience_s:g} s. Start it with the "
                    f"same flags and --node-rank {node}, and check that it reaches --master-addr and --master-port."
                ) from None
            self._take(peer)
        peer = self._arrived.pop(number)
        peer.sendall(node_wire.framed(node_wire.Joined(place)))
        return RemoteRank(number, node, peer, ring)

    def _take(self, peer: socket.socket) -> None:
        """Read a machine's first message; close the connection if it does not belong here."""
        peer.settimeout(_FIRST_S)
        try:
            asked = node_wire.decode_from_node(node_wire.read_one(peer))
        except (OSError, msgspec.DecodeError):
            peer.close()
            return
        if not isinstance(asked, node_wire.Join) or asked.settings != self._settings:
            refusal = (
                "its model, its settings, its key or its version of Octavo differ from those of node 0. Start all "
                "nodes with the same flags"
            )
            with contextlib.suppress(OSError):
                # The user may look at this machine alone, which continues to wait.
                log.warning("a machine at %s is refused: %s.", peer.getpeername()[0], refusal)
                peer.sendall(node_wire.framed(node_wire.Joined(None, refusal)))
            peer.close()
            return
        self._arrived[asked.rank] = peer

    def close(self) -> None:
        self._listener.close()
        for peer in self._arrived.values():
            peer.close()


class RemoteRank:
    """A rank of a `RankGroup` on another machine: a thread sends it the ring's bytes, another one takes its answers."""

    pid = 0
    stopped = False

    def __init__(self, number: int, node: int, peer: socket.socket, ring: RingHandles) -> None:
        self.number, self.device = number, ""
        self._node = node
        self._peer = peer
        self._peer.settimeout(node_wire.SILENCE_S)
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ring = RingReader(RingHandles(*map(os.dup, ring)))
        self._lines: tuple[str, ...] = ()
        self._ended = threading.Event()
        self._listener: threading.Thread | None = None
        self._sender = threading.Thread(target=self._send, name=f"octavo-to-rank-{number}", daemon=True)
        self._sender.start()

    def listen(self, take: Callable[[int, rank_wire.FromRank], None], ended: Callable[[int, str], object]) -> None:
        def run() -> None:
            reason = self._receive(take)
            self._ended.set()
            ended(self.number, reason)

        self._listener = threading.Thread(target=run, name=f"octavo-from-rank-{self.number}", daemon=True)
        self._listener.start()

    def lost(self, reason: str) -> DeviceLostError:
        """Return the error for this rank's loss, with its last log lines."""
        where = f"rank {self.number} on node {self._node}" + (f" ({self.device})" if self.device else "")
        return DeviceLostError(where, reason, self._lines)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def wait(self) -> None:
        """Wait for the rank's end for a short time, then disconnect, which ends it."""
        self._ended.wait(_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Disconnect; the machine then kills the rank."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        for thread in (self._listener, self._sender):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_GRACE_S)
        self._peer.close()

    def _receive(self, take: Callable[[int, rank_wire.FromRank], None]) -> str:
        """Deliver messages until the rank ends; return how it did."""
        frames = Frames()
        try:
            while data := self._peer.recv(_PIECE):
                for encoded in frames.take(data):
                    match node_wire.decode_from_node(encoded):
                        case node_wire.Answer(message):
                            take(self.number, rank_wire.decode_from_rank(message))
                        case node_wire.Ended(reason, lines):
                            self._lines = tuple(lines)
                            return reason
        except ConnectionResetError:
            return _GONE
        except TimeoutError:
            return f"its node gave no sign of life for {node_wire.SILENCE_S:g} s"
        except (OSError, msgspec.DecodeError) as error:
            return f"the connection to its node broke ({error})"
        return _GONE

    def _send(self) -> None:
        waiting = select.poll()
        waiting.register(self._ring.descriptor, select.POLLIN)
        try:
            while not self._ended.is_set():
                if waiting.poll(_LOOK_MS):
                    for data in self._ring.take():
                        self._peer.sendall(data)
        except OSError:
            log.debug("nothing more can be sent to rank %d", self.number)
            with contextlib.suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)
        finally:
            self._ring.close()
