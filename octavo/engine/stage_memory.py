"""`StageMemory`: memory that the ranks of a pipeline stage share, if all are on this machine."""

from __future__ import annotations

import os

import msgspec

from octavo.core.worker_info import RankPlace


class StageMemory:
    """Makes a file in memory for each stage, empty at first, which its ranks inherit. It has no name, so that none is
    left in /dev/shm however the processes end. Enter it until the ranks' processes have started."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def __enter__(self) -> StageMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def give(self, place: RankPlace) -> RankPlace:
        """Return the place with the memory of its stage; unchanged if other machines have ranks of that stage."""
        if place.shards == 1 or not place.stage_is_local:
            return place
        if place.stage not in self._files:
            self._files[place.stage] = os.memfd_create("octavo-sums", os.MFD_CLOEXEC)
        return msgspec.structs.replace(place, memory=self._files[place.stage])
