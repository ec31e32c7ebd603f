"""Choice of the GPUs of each rank and replica. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from octavo.core.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def check_enough(
    needed: int,
    settings: str,
    *,
    remedy: str = "",
    environment: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
) -> None:
    """Raise ConfigError if this machine has GPUs, but fewer than needed. Does nothing where they can't be counted.

    Args:
        settings: the flags that need them.
        remedy: what else helps than fewer GPUs.
        devices: folder where the driver has a file for each GPU.
    """
    stated = environment.get(_VISIBLE)
    names = [one.name for one in devices.glob("nvidia[0-9]*")] if stated is None else _names(stated)
    if 0 < len(names) < needed:
        where = "this machine has" if stated is None else f"{_VISIBLE}={stated} names"
        raise ConfigError(
            f"{settings} needs {needed} GPUs, but {where} {len(names)}. Lower the number, {remedy}or set --device cpu."
        )


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
    return {_VISIBLE: ",".join(_names(stated)[first:end])}


def _names(stated: str) -> list[str]:
    return [name.strip() for name in stated.split(",") if name.strip()]
