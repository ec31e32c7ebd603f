"""Launches that begin while the previous one still runs, on NVIDIA GPUs from Hopper on.

Programmatic dependent launch
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization): once all
programs of a launch have begun, programs of the next launch may start. A kernel must wait before it accesses memory
that other kernels write.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    import torch


def overlap(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel with the argument OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAPS": False}


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Let the next launch start, and wait for the results of the previous ones."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def lead(OVERLAPS: tl.constexpr):
    """Wait, then let the next launch start, which may use results of launches before this one without waiting."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def join(OVERLAPS: tl.constexpr):
    """In the middle of a kernel: wait for the results of the previous launch, which must call `lead`."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def invite(OVERLAPS: tl.constexpr):
    """Let the next launch start."""
    if OVERLAPS:
        gdc_launch_dependents()


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    import torch  # not at the top: processes that only compile kernels run without torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
