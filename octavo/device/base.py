"""`Device`: the worker's interface to the hardware."""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.core.errors import DeviceLostError
from octavo.device.transfer import Link

_GIB = 1 << 30


def too_large(size: int, free: int, workspace: int, where: str) -> str:
    """Return the error text for a KV cache that does not fit; `size` is the useful part of the requested bytes."""
    return (
        f"The KV cache would take {size / _GIB:.2f} GiB (--kv-cache-memory-bytes, or what --max-num-seqs requests of "
        f"--max-model-len can use, if that is less), but {free / _GIB:.2f} GiB of {where} are free, and the largest "
        f"step needs {workspace / _GIB:.2f} GiB of them. Lower --kv-cache-memory-bytes or leave it out, or lower "
        "--max-num-seqs or --max-model-len."
    )


class Device(Link, Protocol):
    """One device of one worker. Sizes in bytes."""

    name: str
    default_depth: int
    """Steps to launch ahead: 0 if a launch computes, 1 if it only enqueues."""
    default_limits: tuple[int, int]
    """Default limits of running sequences and of tokens in one step."""
    largest_step: int
    """Most tokens of a step by default, whatever the model."""
    balanced_tokens: int
    """Tokens in a step up to which matrix products are bound by reading the weights."""
    resident: bool
    """Whether the state of running requests is kept on the device, because reading it back would block the host."""
    engines: int
    """Engines of other models and this one that share the memory; set before anything is loaded."""

    def setup(self, threads: int | None, binding: str, rank: int = 0, size: int = 1) -> None:
        """Prepare this process for computing; call once, before anything is allocated.

        Args:
            binding: the cores to run on; see `binding.py`.
            rank, size: this process among those that compute one model on this machine.
        """
        ...

    def pick_dtype(self, wanted: str, checkpoint: str | None) -> torch.dtype:
        """Return the compute dtype: `wanted`, or for "auto" the best for the checkpoint's dtype and this device."""
        ...

    def check_fits(self, weights: int, stored: int, utilization: float | None) -> None:
        """Raise ConfigError if the weights do not fit; call before they are loaded.

        Args:
            weights: their bytes without quantization.
            stored: bytes of their files.
        """
        ...

    def most_kv(self, utilization: float | None, weights: int) -> int:
        """Return at most how many bytes `kv_budget` will return; call before the weights are loaded.

        Args:
            weights: at least how many bytes they will take.
        """
        ...

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Return the bytes for the KV cache, next to the weights and a step's workspace."""
        ...

    def give_back(self) -> None:
        """Return freed memory to the system."""
        ...

    def loss(self, error: Exception) -> DeviceLostError | None:
        """Return the error to raise if `error` means that the device is lost, else None."""
        ...

    def check_cache(self, size: int, workspace: int) -> None:
        """Raise ConfigError if a KV cache of a stated `size` in bytes does not fit next to a step's workspace."""
        ...
