"""Cores and memory available to this process, within its affinity and limits. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from octavo.core.memory import address_space_left
from octavo.device.cgroup import cpu_quota, memory_left, read

_CPUS = Path("/sys/devices/system/cpu")
_HEADROOM = 128 << 20
"""Address space reserved for late mappings that take little memory: libraries, stacks and arenas of threads."""


def physical_cores(ranks: int = 1, *, overlapping: bool = False) -> int:
    """Return the number of physical cores of this process (not hardware threads), at most the cgroup's CPU quota.

    Args:
        ranks: processes that divide the quota.
        overlapping: they divide the cores, too, since none is bound to its own.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    cores = max(1, len(siblings) // (ranks if overlapping else 1))
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota / ranks)))


def available_memory() -> int:
    """Return the usable bytes: the least of the system's available memory, and what control groups and the limit
    of this process's address space (ulimit -v) leave."""
    addresses = address_space_left()
    limits = (_system_available(), memory_left(), None if addresses is None else max(addresses - _HEADROOM, 0))
    return min(limit for limit in limits if limit is not None)


def free_swap() -> int:
    """Return the free swap space in bytes."""
    return _meminfo("SwapFree") or 0


def has_fast_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    flags = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def cpu_name() -> str:
    """Return the processor's marketing name, or its architecture."""
    line = next((line for line in _cpuinfo() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.machine()


def _system_available() -> int:
    available = _meminfo("MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if available is None else available


def _meminfo(name: str) -> int | None:
    for line in (read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _cpuinfo() -> list[str]:
    return (read(Path("/proc/cpuinfo")) or "").splitlines()


def trim_memory() -> None:
    """Return freed memory that the C library keeps to the system."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)
