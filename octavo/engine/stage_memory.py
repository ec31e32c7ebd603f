"""`StageMemory`: memory shared by the ranks that divide the same layers, if all are on this machine."""

from __future__ import annotations

import os

import msgspec

from octavo.core.worker_info import RankPlace


class StageMemory:
    """Makes a file in memory for each group of such ranks, empty at first, which they inherit. It has no name, so that
    none is left in /dev/shm however the processes end. Enter it until the ranks' processes have started."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def __enter__(self) -> StageMemory:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def give(self, place: RankPlace) -> RankPlace:
        """Return the place with the memory of its group; unchanged if other machines have ranks of that group."""
        if place.shards == 1 or not place.group_is_local:
            return place
        if place.group not in self._files:
            self._files[place.group] = os.memfd_create("octavo-sums", os.MFD_CLOEXEC)
        return msgspec.structs.replace(place, memory=self._files[place.group])
