"""Launches that begin while the one before them still runs, on NVIDIA GPUs from Hopper on.

Programmatic dependent launch
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization): once all
programs of a launch have begun, the next launch's may come to the chip, and wait there. Whoever touches memory that
other kernels write waits first.
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
    """Launch options of a kernel that takes OVERLAPS."""
    return {"OVERLAPS": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAPS": False}


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Let the next launch come, and wait for what the ones before have written."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def lead(OVERLAPS: tl.constexpr):
    """Wait, then let the next launch come, which may use what the ones before this have written without waiting."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def join(OVERLAPS: tl.constexpr):
    """In the middle of a launch: wait for what the one before, which leads, has written."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def invite(OVERLAPS: tl.constexpr):
    """Let the next launch come."""
    if OVERLAPS:
        gdc_launch_dependents()


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    import torch  # kernels are compiled by processes that do without

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
