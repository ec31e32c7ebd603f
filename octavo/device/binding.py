"""Bind compute threads to cores. Reading memory of another socket takes about twice as long. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Set
from pathlib import Path

from octavo.core.errors import ConfigError

log = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")
_FLAG = "--cpu-omp-threads-bind"


def bind(binding: str, nodes: Path = NODES, rank: int = 0, size: int = 1) -> None:
    """Bind this process, and the threads that it starts from now on, to some of its cores.

    Args:
        binding: "auto" takes the NUMA node with most of this process's cores, and does nothing on a machine with one
            node; several ranks take a node each, or divide the cores if there are fewer nodes. "nobind" does nothing;
            otherwise a list like "0-3,8" of the kernel's numbers, for several ranks one each: "0-3|4-7".
        nodes: folder where the kernel describes the nodes.
        rank, size: this process among those that compute one model on this machine.

    Raises:
        ConfigError: the list can't be parsed, or names cores that this process may not use.
    """
    if binding == "nobind" or not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    if binding != "auto":
        chosen = _stated(_own_list(binding, rank, size), allowed)
    else:
        chosen = _largest_node(allowed, nodes) if size == 1 else divided(allowed, nodes, rank, size)
        if rank == 0 and size > len(allowed):
            log.warning(
                "%d ranks share %d cores, so that some wait for others in every layer: with at most %d ranks, answers "
                "come sooner",
                size,
                len(allowed),
                len(allowed),
            )
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


def divided(allowed: set[int], nodes: Path, rank: int, size: int) -> set[int]:
    """Return a rank's cores: those of NUMA nodes if there are as many as ranks, else a share of a node's, with both
    hardware threads of each core."""
    parts = sorted((part for part in _parts(allowed, nodes) if part), key=min) or [allowed]
    if len(parts) >= size:
        return set().union(*parts[rank * len(parts) // size : (rank + 1) * len(parts) // size])
    node = rank * len(parts) // size
    sharing = [other for other in range(size) if other * len(parts) // size == node]
    cores, place = _physical(parts[node], nodes.parent / "cpu"), sharing.index(rank)
    if len(cores) < len(sharing):
        cores = [{core} for core in sorted(parts[node])]
    own = cores[place * len(cores) // len(sharing) : (place + 1) * len(cores) // len(sharing)]
    return set().union(*own) or cores[place % len(cores)]


def _physical(cores: Set[int], folder: Path) -> list[set[int]]:
    """Return the hardware threads of each physical core, in the order of their first ones."""
    found: dict[str, set[int]] = {}
    for core in sorted(cores):
        try:
            siblings = (folder / f"cpu{core}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(core)
        found.setdefault(siblings, set()).add(core)
    return list(found.values())


def _own_list(binding: str, rank: int, size: int) -> str:
    lists = binding.split("|")
    if size > 1 and len(lists) != size:
        raise ConfigError(f"{_FLAG} {binding!r} must have one list of cores for each of {size} ranks, such as 0-3|4-7.")
    return lists[rank] if size > 1 else binding


def _largest_node(allowed: set[int], nodes: Path) -> set[int]:
    return max(_parts(allowed, nodes), key=len, default=allowed) or allowed


def _parts(allowed: set[int], nodes: Path) -> list[set[int]]:
    """Return the allowed cores of each NUMA node."""
    parts = []
    for folder in sorted(nodes.glob("node[0-9]*")):
        try:
            parts.append(parse_cores((folder / "cpulist").read_text().strip()) & allowed)
        except (OSError, ValueError):  # a node without cores has an empty list
            continue
    return parts
