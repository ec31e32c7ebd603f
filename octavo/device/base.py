"""`Device`: what the worker asks of the hardware under it."""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.core.errors import DeviceLostError
from octavo.device.transfer import Link

_GIB = 1 << 30


def too_large(size: int, free: int, workspace: int, where: str) -> str:
    """Error text for a KV cache that does not fit; `size` is what of the bytes asked for could be of use."""
    return (
        f"A KV cache of {size / _GIB:.2f} GiB was asked for, but {free / _GIB:.2f} GiB of {where} are free, and the "
        f"largest step needs {workspace / _GIB:.2f} GiB of them. Lower --kv-cache-memory-bytes or leave it out. A "
        "cache is never larger than --max-num-seqs requests of --max-model-len can use, so lowering these will do, too."
    )


class Device(Link, Protocol):
    """One device of one worker. Sizes in bytes."""

    name: str
    default_depth: int
    """Steps to launch ahead: 0 where launching computes, 1 where it only enqueues."""
    default_limits: tuple[int, int]
    """Default limits of running sequences and of tokens in one step."""
    balanced_tokens: int
    """The number of tokens in a step up to which products take little longer than reading the weights."""
    resident: bool
    """Whether the state of running requests is kept on the device, because reading it back would make the host wait."""

    def setup(self, threads: int | None, binding: str) -> None:
        """Prepare this process for computing; called once, before anything is allocated.

        Args:
            binding: the cores to run on; see `binding.py`.
        """
        ...

    def pick_dtype(self, wanted: str, checkpoint: str | None) -> torch.dtype:
        """The dtype to compute in: `wanted`, or for "auto" the best for the checkpoint's dtype and this device."""
        ...

    def check_fits(self, weights: int, stored: int, utilization: float | None) -> None:
        """Raise ConfigError if the weights do not fit; called before they are loaded.

        Args:
            weights: their bytes if none were quantized.
            stored: bytes of their files.
        """
        ...

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Bytes for the KV cache beside the weights and the memory that a step needs."""
        ...

    def give_back(self) -> None:
        """Return freed memory to the system."""
        ...

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return what to raise if the device can't compute any more after `error`, else None."""
        ...

    def check_cache(self, size: int, workspace: int) -> None:
        """Raise ConfigError if a KV cache of `size` bytes that was asked for, and what a step needs, do not fit."""
        ...
