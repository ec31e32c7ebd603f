"""Meeting of the ranks' processes: a store where they find each other, and the process group that they form."""

from __future__ import annotations

import datetime
import os

import torch
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]  # not in __all__

from octavo.core.errors import ConfigError
from octavo.core.worker_info import RankPlace
from octavo.parallel.collectives import TorchCollectives
from octavo.parallel.mesh import ALONE, Mesh

LOCAL = "127.0.0.1"
_MEET = datetime.timedelta(seconds=120)


class MeetingPoint:
    """The store of one group of ranks, in the process that starts them. Keep it until they have met.

    Attributes:
        port: where the ranks reach it.
    """

    def __init__(self) -> None:
        self._store = TCPStore(LOCAL, 0, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port


def join(place: RankPlace, accelerator: str) -> Mesh:
    """Meet the other ranks and return the mesh; call once in each rank's process.

    Args:
        accelerator: "cpu" communicates by gloo, "cuda" by NCCL.

    Raises:
        ConfigError: the ranks did not meet.
    """
    if place.size == 1:
        return ALONE
    if accelerator == "cpu" and place.host == LOCAL:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = TCPStore(place.host, place.port, is_master=False, timeout=_MEET)
        backend = "gloo" if accelerator == "cpu" else "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        init_process_group(backend, store=store, rank=place.rank, world_size=place.size, device_id=device)
    except RuntimeError as error:
        raise ConfigError(
            f"Rank {place.rank} of {place.size} did not reach the others at {place.host}:{place.port} within "
            f"{_MEET.seconds} s: {error}. The log of another rank may say why it did not start."
        ) from error
    return Mesh(place.rank, place.size, TorchCollectives())
