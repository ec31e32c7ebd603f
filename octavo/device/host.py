"""What this process may use of the machine: cores and memory, with cgroup limits and affinity respected. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Physical cores given to this process: one a pair of hardware threads, at most the cgroup's CPU quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    cores = max(1, len(siblings))
    quota, _, period = (_read(_CGROUP / "cpu.max") or "max 1").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory() -> int:
    """Bytes that can still be used: the system's available memory, or what the cgroup leaves if that is less."""
    available = _system_available()
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit and limit.isdigit() and used:
        available = min(available, int(limit) - int(used) + _reclaimable())
    return max(available, 0)


def free_swap() -> int:
    """Bytes of swap space that are free."""
    return _meminfo("SwapFree") or 0


def has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 natively (AVX512-BF16, AMX, or Arm's BF16 extension)."""
    flags = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def cpu_name() -> str:
    """The processor's marketing name, or its architecture."""
    line = next((line for line in _cpuinfo() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.machine()


def _system_available() -> int:
    available = _meminfo("MemAvailable")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 if available is None else available


def _meminfo(name: str) -> int | None:
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _reclaimable() -> int:
    """Page cache that counts against the cgroup but goes when memory is asked for."""
    for line in (_read(_CGROUP / "memory.stat") or "").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _cpuinfo() -> list[str]:
    return (_read(Path("/proc/cpuinfo")) or "").splitlines()


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def trim_memory() -> None:
    """Give memory that was freed back to the system, where the C library keeps it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)
