"""Choice of the GPUs of each rank and replica. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environment_of(place: int, size: int, each: int = 1, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which one of several processes sees only its own GPUs.

    They take the GPUs in the order of CUDA_VISIBLE_DEVICES, or of the driver without it. A single process sees all.

    Args:
        place, size: the process's number, and the number of processes.
        each: GPUs of a process.
    """
    if size == 1:
        return {}
    stated = environment.get(_VISIBLE)
    first, end = place * each, (place + 1) * each
    if stated is None:
        return {_VISIBLE: ",".join(map(str, range(first, end)))}
    names = [name.strip() for name in stated.split(",") if name.strip()]
    return {_VISIBLE: ",".join(names[first:end])}
