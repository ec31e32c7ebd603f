"""Select a `Device` by name."""

from __future__ import annotations

import importlib.util

import torch

from octavo.device.base import Device
from octavo.device.cpu import CpuDevice
from octavo.device.cuda import CudaDevice, check_usable
from octavo.device.visible import check_enough


def select_device(name: str) -> Device:
    """Return the device; "auto" takes the best one. Raise ConfigError if it can't be used."""
    return CudaDevice() if takes_gpu(name) else CpuDevice()


def takes_gpu(name: str) -> bool:
    """Return whether `select_device` takes a GPU."""
    return name == "cuda" or (
        name == "auto" and torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    )


def check_gpus(name: str, needed: int, settings: str) -> None:
    """Raise ConfigError if the device is a GPU and this machine has too few. No memory of a GPU is taken.

    Args:
        name: as for `select_device`.
        settings: the flags that need them.
    """
    if takes_gpu(name):
        check_usable()
        check_enough(needed, settings, remedy="divide the model over several machines (--nnodes), ")
