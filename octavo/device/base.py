"""`Device`: what the worker asks of the hardware under it."""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.core.errors import DeviceLostError

_GIB = 1 << 30


def too_large(size: int, free: int, workspace: int, where: str) -> str:
    """Error text for a KV cache that does not fit; `size` is what of the bytes asked for could be of use."""
    return (
        f"A KV cache of {size / _GIB:.2f} GiB was asked for, but {free / _GIB:.2f} GiB of {where} are free, and the "
        f"largest step needs {workspace / _GIB:.2f} GiB of them. Lower --kv-cache-memory-bytes or leave it out. A "
        "cache is never larger than --max-num-seqs requests of --max-model-len can use, so lowering these will do, too."
    )


class Device(Protocol):
    """One device of one worker. Sizes in bytes."""

    torch_device: torch.device
    name: str
    default_depth: int
    """Steps worth launching ahead: 0 where launching computes, 1 where it only enqueues."""
    default_limits: tuple[int, int]
    """Sequences that run at once, and tokens computed in one step, unless others are asked for."""
    balanced_tokens: int
    """Tokens of a step of which the products take little longer than reading the weights."""
    resident: bool
    """Whether running requests live on the device, because reading anything back would make the host wait."""

    def setup(self, threads: int | None, binding: str) -> None:
        """Prepare this process for computing; called once, before anything is allocated.

        `binding` says which cores it keeps to; see `binding.py`.
        """
        ...

    def pick_dtype(self, wanted: str, checkpoint: str | None) -> torch.dtype:
        """The dtype to compute in: `wanted`, or for "auto" what suits the checkpoint's dtype and this device."""
        ...

    def check_fits(self, weights: int, stored: int, utilization: float | None) -> None:
        """Raises ConfigError if weights can't be loaded; called before they are.

        Args:
            weights: their bytes, were none quantized.
            stored: bytes of their files.
        """
        ...

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Bytes for the KV cache, given those that the weights take, and those that a step needs beside them."""
        ...

    def give_back(self) -> None:
        """Let other processes have the memory that was freed."""
        ...

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return what to raise if the device can't compute any more after `error`, else None."""
        ...

    def check_cache(self, size: int, workspace: int) -> None:
        """Raise ConfigError if a KV cache of `size` bytes that was asked for, and what a step needs, do not fit."""
        ...
