"""Limits of Linux control groups, as set by containers, services (systemd) and batch systems.

A limit may be set on the process's own group or on any ancestor, and all apply. A container sees its group as the root
of the file system, a service does not. Version 1 has a tree for each resource, version 2 one for all (cgroups(7)).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For each version: files of the limit and the usage, and the statistic of reclaimable memory."""


def memory_left() -> int | None:
    """Return the bytes that may still be used; None without a limit."""
    left = [
        int(limit) - used + _of_stat(folder, reclaimable)
        for folder in _groups("memory")
        for limit_name, used_name, reclaimable in _MEMORY
        if (limit := read(folder / limit_name) or "").isdigit() and (used := _number(folder / used_name)) is not None
    ]
    return max(min(left), 0) if left else None


def memory() -> int:
    """Return the bytes that this machine has, or that may still be used here if a limit leaves fewer."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = memory_left()
    return there if left is None else min(there, left)


def cpu_quota() -> float | None:
    """Return the CPU quota in processors; None without a limit."""
    quotas = []
    for folder in _groups("cpu"):
        quota, _, period = (read(folder / "cpu.max") or "").partition(" ")
        if not quota:
            quota, period = read(folder / "cpu.cfs_quota_us") or "", read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 mean no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def most_processes() -> int | None:
    """Return the most processes and threads of this process's groups; None without a limit."""
    limits = (_number(folder / "pids.max") for folder in _groups("pids"))
    return min((limit for limit in limits if limit is not None), default=None)


def read(path: Path) -> str | None:
    """Return a small file's stripped text; None if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _groups(controller: str) -> Iterator[Path]:
    """Return the folders of this process's group and its visible ancestors."""
    for line in (read(_OWN) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _ROOT / controller if controllers else _ROOT
        folder = mount / path.strip("/")
        yield folder
        yield from (around for around in folder.parents if around.is_relative_to(mount))


def _of_stat(folder: Path, name: str) -> int:
    for line in (read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdigit() else None
