"""Select a `Device` by name."""

from __future__ import annotations

import importlib.util

import torch

from octavo.device.base import Device
from octavo.device.cpu import CpuDevice
from octavo.device.cuda import CudaDevice


def select_device(name: str) -> Device:
    """Return the device; "auto" takes the best one. Raise ConfigError if it can't be used."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available() and importlib.util.find_spec("triton")):
        return CudaDevice()
    return CpuDevice()
