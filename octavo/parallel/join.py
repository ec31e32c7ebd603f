"""Meeting of the ranks' processes: a store where they find each other, and the process group that they form."""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections import deque

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]  # not in __all__

from octavo.core.errors import ConfigError
from octavo.core.worker_info import RankPlace
from octavo.native.build import NativeBuildError
from octavo.native.exchange import Exchange
from octavo.parallel.collectives import Collectives, TorchCollectives
from octavo.parallel.mesh import ALONE, Mesh
from octavo.parallel.peer_memory import Share
from octavo.parallel.peers import alike, compile_trials, with_peers
from octavo.parallel.shared import SharedMemory
from octavo.parallel.stage import WHOLE, Stage

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
_MEET = datetime.timedelta(seconds=120)
_MOST_SENT = 16
"""Tensors on their way to the next stage; more wait. Each is kept until it has arrived."""


class MeetingPoint:
    """The store of one group of ranks, in the process that starts them. Enter it until they have ended.

    Attributes:
        port: where the ranks reach it.
    """

    def __init__(self) -> None:
        self._store: TCPStore | None = TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._store = None


class TorchLink:
    """A `StageLink` of torch's default process group.

    Args:
        before, after: the ranks that this one receives from and sends to.
    """

    def __init__(self, before: int, after: int) -> None:
        self._before, self._after = before, after
        self._sent: deque[tuple[torch.distributed.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        while self._sent and (len(self._sent) >= _MOST_SENT or self._sent[0][0].is_completed()):
            self._sent.popleft()[0].wait()
        x = x.contiguous()
        work = torch.distributed.isend(x, self._after)
        assert work is not None, "this process is in the group"
        self._sent.append((work, x))

    def receive(self, x: Tensor) -> None:
        torch.distributed.recv(x, self._before)


def join(
    place: RankPlace,
    accelerator: str,
    *,
    peers: bool = True,
    later: bool = False,
    isa: str = "auto",
    limit_s: float | None = None,
) -> tuple[Mesh, Stage]:
    """Meet the other ranks; return this rank's mesh and its stage. Call once in each rank's process.

    Args:
        accelerator: "cpu" communicates in the memory that the ranks share, or else by gloo; "cuda" by NCCL and by the
            memory of peers.
        peers: GPUs may write to each other's memory.
        later: sums are begun before they are awaited.
        isa: instruction set of the CPU kernels that add up in shared memory.
        limit_s: most seconds that these wait for another rank; None for no limit.

    Raises:
        ConfigError: the ranks did not meet, or can't share a GPU.
    """
    if place.size == 1:
        return ALONE, WHOLE
    if accelerator == "cpu" and place.host == LOCAL:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    began = time.perf_counter()
    through_peers = accelerator == "cuda" and peers and _on_one_machine(place)
    trials = compile_trials(place.shards) if through_peers else None  # while the process groups are made
    try:
        store = TCPStore(place.host, place.port, is_master=False, timeout=_MEET)
        shared = accelerator == "cuda" and _share_a_gpu(place, store)
        backend = "gloo" if accelerator == "cpu" or shared else "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        init_process_group(backend, store=store, rank=place.rank, world_size=place.size, device_id=device)
    except RuntimeError as error:
        raise ConfigError(
            f"Rank {place.rank} of {place.size} did not reach the others at {place.host}:{place.port} within "
            f"{_MEET.seconds} s: {error}. The log of another rank may say why it did not start."
        ) from error
    collectives: Collectives = TorchCollectives(_own_group(place), later=later)
    met = time.perf_counter()
    if trials is not None:
        trials.wait()
    if shared or through_peers:
        collectives = _through_peers(place, store, None if shared else collectives, later=later)
        log.info("met the other ranks in %.1f s; tried sums in %.1f s", met - began, time.perf_counter() - met)
    if accelerator == "cpu" and place.memory >= 0:
        collectives = _in_shared_memory(place, store, isa, limit_s) or collectives
    each = place.shards * place.contexts
    stage = Stage(place.stage, place.stages, TorchLink(place.rank - each, place.rank + each))
    return Mesh(place.shard, place.shards, collectives, _context(place, store, shared=shared)), stage


def _own_group(place: RankPlace) -> torch.distributed.ProcessGroup | None:
    """Return the process group of the ranks that divide the same layers; None for that of all ranks. Every rank makes
    all groups."""
    if place.shards == place.size:
        return None
    firsts = range(0, place.size, place.shards)
    groups = [torch.distributed.new_group(list(range(first, first + place.shards))) for first in firsts]
    own: torch.distributed.ProcessGroup = groups[place.group]
    return own


def _context(place: RankPlace, store: TCPStore, *, shared: bool) -> Mesh | None:
    """Return the ranks that have the same part of the same layers as this one; None if there are no others. Every rank
    makes all groups.

    Args:
        shared: ranks have the same GPU, where only the memory of peers serves.
    """
    if place.contexts == 1:
        return None
    each, groups = place.shards * place.contexts, []
    for stage in range(place.stages):
        for shard in range(place.shards):
            first = stage * each + shard
            ranks = list(range(first, first + each, place.shards))
            groups.append(None if place.contexts == place.size else torch.distributed.new_group(ranks))
    group: Collectives | None = TorchCollectives(groups[place.stage * place.shards + place.shard])
    if shared:
        name = f"context {place.stage} {place.shard}"
        group = with_peers(place.context, _sharing(store, name, place.context, place.contexts), None)
    if group is None:
        raise ConfigError("These ranks can't share a GPU: CUDA_VISIBLE_DEVICES must name one for each rank.")
    return Mesh(place.context, place.contexts, group)


def _share_a_gpu(place: RankPlace, store: TCPStore) -> bool:
    """Return whether some ranks have the same GPU, which NCCL refuses."""
    own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return len(set(_sharing(store, "gpu", place.rank, place.size)("uuid", own.encode()))) < place.size


def _on_one_machine(place: RankPlace) -> bool:
    """Return whether all ranks of this rank's group are on one machine, and there are several. With several
    groups of the same layers, which must sum in the same way, return whether each group is on one machine."""
    if place.contexts > 1 and place.local[1] % place.shards:
        return False
    return place.shards > 1 and place.group_is_local


def _through_peers(place: RankPlace, store: TCPStore, others: Collectives | None, *, later: bool) -> Collectives:
    """Return collectives through the memory of peers where they can, and `others` elsewhere; None if there are none."""
    if others is None and place.stages > 1:
        raise ConfigError("Stages of a pipeline can't share a GPU: CUDA_VISIBLE_DEVICES must name one for each rank.")
    if place.shards == 1:
        return TorchCollectives()  # never used: a rank alone sums nothing
    share = _sharing(store, f"group {place.group}", place.shard, place.shards)
    made = with_peers(place.shard, share, others, later=later)
    if made is None:
        raise ConfigError("These ranks can't share a GPU: CUDA_VISIBLE_DEVICES must name one for each rank.")
    if place.contexts == 1 or others is None:
        return made
    return alike(made, others, _sharing(store, f"shard {place.stage} {place.shard}", place.context, place.contexts))


def _sharing(store: TCPStore, group: str, rank: int, size: int) -> Share:
    """Return a function that exchanges data of a group's ranks through the store."""

    def share(name: str, data: bytes) -> list[bytes]:
        store.set(f"{group}/{name}/{rank}", "=" + data.hex())  # the store has no empty values
        return [bytes.fromhex(store.get(f"{group}/{name}/{other}").decode()[1:]) for other in range(size)]

    return share


def _in_shared_memory(place: RankPlace, store: TCPStore, isa: str, limit_s: float | None) -> SharedMemory | None:
    """Return the collectives in the group's memory; None if some rank of the group can't use it."""
    own = None
    try:
        own = SharedMemory(Exchange(place.memory, place.shard, place.shards, limit_s, isa))
    except (NativeBuildError, MemoryError) as error:
        log.warning("sums over ranks take gloo, since the ranks can't add up in shared memory: %s", error)
    share = _sharing(store, f"group {place.group}", place.shard, place.shards)
    return own if all(share("shared memory", b"" if own is None else b"yes")) else None
