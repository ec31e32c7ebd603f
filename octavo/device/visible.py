"""Choice of the GPU of each rank. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def environment_of(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which a rank's process sees only its own GPU.

    Ranks take the GPUs in the order of CUDA_VISIBLE_DEVICES, or of the driver without it. A single rank sees all and
    takes the first, as a process without ranks does.
    """
    if size == 1:
        return {}
    stated = environment.get(_VISIBLE)
    if stated is None:
        return {_VISIBLE: str(rank)}
    names = [name.strip() for name in stated.split(",") if name.strip()]
    return {_VISIBLE: names[rank] if rank < len(names) else ""}
