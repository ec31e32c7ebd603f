"""Bind compute threads to cores. Reading memory of another socket takes about twice as long. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Set
from pathlib import Path

from octavo.core.errors import ConfigError

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_FLAG = "--cpu-omp-threads-bind"


def bind(binding: str, nodes: Path = _NODES) -> None:
    """Bind this process, and the threads that it starts from now on, to some of its cores.

    Args:
        binding: "auto" takes the NUMA node with most of this process's cores, and does nothing on a machine with one
            node; "nobind" does nothing; otherwise a list like "0-3,8" of the kernel's numbers.
        nodes: folder where the kernel describes the nodes.

    Raises:
        ConfigError: the list can't be parsed, or names cores that this process may not use.
    """
    if binding == "nobind" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    chosen = _largest_node(allowed, nodes) if binding == "auto" else _stated(binding, allowed)
    if chosen != allowed:
        os.sched_setaffinity(0, chosen)
        log.info("compute threads are bound to the cores %s", format_cores(chosen))


def parse_cores(text: str) -> set[int]:
    """Parse a list such as "0-3,8"; raise ValueError if malformed."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high:
            raise ValueError(part)
        cores.update(range(low, high + 1))
    return cores


def format_cores(cores: Set[int]) -> str:
    """Return the numbers in the kernel's notation: "0-3,8"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _stated(binding: str, allowed: set[int]) -> set[int]:
    try:
        chosen = parse_cores(binding)
    except ValueError:
        raise ConfigError(
            f'{_FLAG} {binding!r} can\'t be read: give a list of cores like "0-3,8", or auto, or nobind.'
        ) from None
    if foreign := chosen - allowed:
        raise ConfigError(
            f"{_FLAG} {binding} names the cores {format_cores(foreign)}, which this process may not use; "
            f"it has {format_cores(allowed)}."
        )
    return chosen


def _largest_node(allowed: set[int], nodes: Path) -> set[int]:
    parts = []
    for folder in sorted(nodes.glob("node[0-9]*")):
        try:
            parts.append(parse_cores((folder / "cpulist").read_text().strip()) & allowed)
        except (OSError, ValueError):  # a node without cores has an empty list
            continue
    return max(parts, key=len, default=allowed) or allowed
