"""Ranks as threads of the test's process: they start in no time, and share its installed features.

They run `RankServer` over real sockets and a real ring, as processes do; only their collectives are not torch's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from octavo.build_worker import build_rank
from octavo.core.worker_info import RankPlace
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank import RankServer
from octavo.engine.rank_process import EarlyRanks, RankProcess
from octavo.engine.ring import RingHandles, RingReader
from octavo.features import payload_types
from octavo.native.exchange import Exchange
from octavo.parallel.collectives import Collectives
from octavo.parallel.mesh import Mesh
from octavo.parallel.shared import SharedMemory
from octavo.parallel.stage import Stage

_PATIENCE_S = 60.0


class ThreadCollectives:
    """`Collectives` of one of several threads, which exchange tensors in a list."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[Tensor]) -> None:
        self._rank, self._barrier, self._given = rank, barrier, given

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchanged(x))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        counts = [one.tolist() for one in self.all_gather(torch.tensor(sent))]
        rows = [one.split(count)[self._rank] for one, count in zip(self._exchanged(x), counts, strict=True)]
        assert [len(one) for one in rows] == list(received)
        return rows

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        """Return what all threads gave, of any shapes."""
        self._given[self._rank] = x.clone()
        self._barrier.wait(_PATIENCE_S)
        found = list(self._given)
        self._barrier.wait(_PATIENCE_S)
        return found


class ThreadLink:
    """A `StageLink` of one of several threads, which exchange tensors in queues."""

    def __init__(self, given: Mapping[int, SimpleQueue[Tensor]], rank: int, after: int) -> None:
        self._given, self._rank, self._after = given, rank, after

    def send(self, x: Tensor) -> None:
        self._given[self._after].put(x.clone())

    def receive(self, x: Tensor) -> None:
        x.copy_(self._given[self._rank].get(timeout=_PATIENCE_S))


class RankThread(RankProcess):
    """A `RankProcess` whose rank is a thread."""

    stopped = False
    code = None
    pid = 0

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
        config, files, _, place = payload
        self.number, self.device = number, ""
        if memory >= 0:
            place = msgspec.structs.replace(place, memory=os.dup(memory))  # the engine closes its own
        self._lines = deque()
        self._peer, child = socket.socketpair()
        self._listener = None
        reader = RingReader(RingHandles(*map(os.dup, ring)))

        def serve() -> None:
            with child:
                codec = PlanCodec(payload_types())
                RankServer(child, reader, lambda: build_rank(config, files, place), codec, answers=place.answers).run()

        self._thread = threading.Thread(target=serve, name=f"rank {number}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(_PATIENCE_S)

    def kill(self) -> None:
        self.hang_up()
        if self._listener is not None:
            self._listener.join(_PATIENCE_S)
        self._peer.close()

    def _end(self) -> str:
        return "its thread ended"


TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "cpu_bind": "nobind"}
"""Settings of an engine of two ranks, on any machine."""

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2, "device": "cpu", "cpu_bind": "nobind"}
"""Settings of an engine of two stages, on any machine."""

CONTEXTS: dict[str, Any] = {
    "prefill_context_parallel_size": 2,
    "prefill_context_parallel_threshold": 8,
    "device": "cpu",
    "cpu_bind": "nobind",
}
"""Settings of an engine whose two ranks divide the tokens of prompts, on any machine."""


def ranks_in_threads(monkeypatch: pytest.MonkeyPatch, *, native: bool = True) -> None:
    """Have engines of several ranks run them in threads. A single rank stays a process.

    Args:
        native: the ranks share memory, so that models can run as native programs.
    """
    meetings: dict[tuple[int, str, int], tuple[threading.Barrier, list[Tensor]]] = {}
    passed: dict[int, dict[int, SimpleQueue[Tensor]]] = {}
    meeting = threading.Lock()

    def join(place: RankPlace, accelerator: str, *, isa: str, **settings: Any) -> tuple[Mesh, Stage]:
        if place.size == 1:
            return Mesh(), Stage()
        own = threading.Barrier(place.shards), [torch.empty(0)] * place.shards
        with meeting:
            shared = meetings.setdefault((place.port, "group", place.group), own)
            same = place.stage * place.shards + place.shard
            alike = threading.Barrier(place.contexts), [torch.empty(0)] * place.contexts
            context = meetings.setdefault((place.port, "context", same), alike)
            queues = passed.setdefault(place.port, {rank: SimpleQueue() for rank in range(place.size)})
        each = place.shards * place.contexts
        link = ThreadLink(queues, place.rank, place.rank + each)
        group: Collectives = ThreadCollectives(place.shard, *shared)
        if native and place.memory >= 0:
            group = SharedMemory(Exchange(place.memory, place.shard, place.shards, _PATIENCE_S, isa))
            os.close(place.memory)
        dividing = Mesh(place.context, place.contexts, ThreadCollectives(place.context, *context))
        mesh = Mesh(place.shard, place.shards, group, dividing if place.contexts > 1 else None)
        return mesh, Stage(place.stage, place.stages, link)

    def start(module: str, payload: Any, *args: Any, **kwargs: Any) -> RankProcess:
        place: RankPlace = payload[3]
        return (RankThread if place.size > 1 else RankProcess)(module, payload, *args, **kwargs)

    monkeypatch.setattr("octavo.build.EarlyRanks", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("octavo.build_worker.RankProcess", start)
    monkeypatch.setattr("octavo.worker.worker.join", join)
