"""`Device`: what the worker asks of the hardware under it."""

from __future__ import annotations

from typing import Protocol

import torch


class Device(Protocol):
    """One device of one worker. Sizes in bytes."""

    torch_device: torch.device
    name: str
    default_depth: int
    """Steps worth launching ahead: 0 where launching computes, 1 where it only enqueues."""
    default_limits: tuple[int, int]
    """Sequences that run at once, and tokens computed in one step, unless others are asked for."""
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

    def check_fits(self, weights: int, utilization: float | None) -> None:
        """Raises ConfigError if so many bytes of weights can't be loaded; called before they are."""
        ...

    def kv_budget(self, utilization: float | None, weights: int, workspace: int = 0) -> int:
        """Bytes for the KV cache, given those that the weights take, and those that a step needs beside them."""
        ...
