"""Which `Device` a name stands for."""

from __future__ import annotations

import importlib.util

import torch

from octavo.device.base import Device
from octavo.device.cpu import CpuDevice
from octavo.device.cuda import CudaDevice


def select_device(name: str) -> Device:
    """ "auto" takes the best there is. Raises ConfigError for a device that can't be used."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available() and importlib.util.find_spec("triton")):
        return CudaDevice()
    return CpuDevice()
