"""What a figure was measured on: without it, a figure says nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("octavo", "torch", "transformers", "numpy")


class Report:
    """Figures that are printed, and written to a file, as soon as they are known."""

    def __init__(self, facts: dict[str, Any], path: Path | None) -> None:
        self.facts = facts
        self._path = path

    def note(self, name: str, value: Any) -> None:
        self.facts[name] = value
        print(name, json.dumps(value), flush=True)
        if self._path:
            self._path.write_text(json.dumps(self.facts, indent=1) + "\n")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit, and the command line."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def describe_gpu() -> dict[str, str] | None:
    """Name, memory, driver and power limit of the first NVIDIA GPU; None where there is none."""
    fields = ("name", "memory.total", "driver_version", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return dict(zip(fields, map(str.strip, done.stdout.strip().split(",")), strict=True))


def seconds_since_exec() -> float:
    """How long this process has run, imports included (Linux: to a hundredth of a second)."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8")
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5), since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None
