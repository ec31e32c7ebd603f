"""Which `Device` a name stands for."""

from __future__ import annotations

from octavo.core.errors import ConfigError
from octavo.device.base import Device
from octavo.device.cpu import CpuDevice


def select_device(name: str) -> Device:
    """ "auto" takes the best there is. Raises ConfigError for a device that can't be used."""
    if name in ("auto", "cpu"):
        return CpuDevice()
    raise ConfigError(
        f"--device {name} is not supported by this version of Octavo, which runs on CPUs; use --device cpu."
    )
