"""An engine's processes: found, stopped and continued together, their memory counted together (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """A process and all its descendants, parents first; those of the session that it leads too, whose parents may have
    ended before them."""
    children: dict[int, list[int]] = {}
    session = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                parent, _, leader = map(int, stat.rpartition(")")[2].split()[1:4])
                children.setdefault(parent, []).append(int(entry.name))
                if leader == root:
                    session.append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, []))
    return found + [pid for pid in session if pid not in found]


def freeze(root: int, timeout: float = 5.0) -> None:
    """Stop an engine so that it can't take a core from the one whose turn it is; returns when it stands still."""
    pids = tree(root)
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    until = time.monotonic() + timeout
    while any(_state(pid) not in "TtZX" for pid in pids) and time.monotonic() < until:
        time.sleep(0.001)


def thaw(root: int) -> None:
    for pid in reversed(tree(root)):
        _send(pid, signal.SIGCONT)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, by SIGKILL too. For a child between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes], grace: float = 15.0) -> None:
    """End an engine with all its processes: politely, then not."""
    pids = tree(process.pid)
    for pid in pids:
        _send(pid, signal.SIGCONT)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    for pid in pids:
        _send(pid, signal.SIGKILL)
    process.wait()


def end_all_on_signals() -> None:
    """On the first SIGTERM, SIGHUP or SIGINT, end everything that this process has started, then exit.

    Later ones are ignored: timeout(1) sends two in a row, and an exception out of the second would keep cleanup from
    reaching the engines that stand still.
    """
    for number in _ENDING:
        signal.signal(number, _end_all)


def _end_all(number: int, frame: FrameType | None, grace: float = 5.0) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    pids = {pid for child in tree(os.getpid())[1:] for pid in tree(child)}
    for pid in pids:
        _send(pid, signal.SIGTERM)  # first, so that no process runs on unaware of it
        _send(pid, signal.SIGCONT)
    # By their states, for the interrupted code may hold the lock of a Popen.
    until = time.monotonic() + grace
    while any(_state(pid) not in "ZX" for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    for pid in pids:
        _send(pid, signal.SIGKILL)
    sys.exit(128 + number)


def _state(pid: int) -> str:
    """A letter, as proc(5) has it; X for a process that is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class MemoryWatch:
    """Samples the memory of an engine's processes in a thread, from when it is made until it is left.

    After it: `peak_rss` and `peak_pss`, the largest sums seen, in bytes. PSS counts a page that n processes share as
    1/n of a page in each, so its sum counts it once; RSS counts it n times.
    """

    def __init__(self, root: int, interval: float = 0.05) -> None:
        self.peak_rss = self.peak_pss = 0
        self._root, self._interval = root, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            rss, pss = memory(tree(self._root))
            self.peak_rss, self.peak_pss = max(self.peak_rss, rss), max(self.peak_pss, pss)
            # Walking the page tables takes the kernel time: never more than a tenth of it.
            self._stop.wait(max(self._interval, 9 * (time.monotonic() - began)))


def memory(pids: list[int]) -> tuple[int, int]:
    """(RSS, PSS) summed over processes, in bytes."""
    total = {"Rss": 0, "Pss": 0}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines():
                key, _, rest = line.partition(":")
                if key in total:
                    total[key] += int(rest.split()[0]) * 1024
    return total["Rss"], total["Pss"]


class CpuClock:
    """How busy some processors were with anything but this process and the engine on turn, since it was made."""

    def __init__(self, engine: int, cores: Sequence[int]) -> None:
        self._engine = engine
        self._names = {f"cpu{core}" for core in cores}
        self._started = time.monotonic()
        self._before = self._others()

    def others(self) -> float:
        """The share of the processors that went elsewhere, stolen time included."""
        seconds = time.monotonic() - self._started
        return max(0.0, (self._others() - self._before) / seconds / len(self._names))

    def _others(self) -> float:
        busy = 0
        for line in (_PROC / "stat").read_text(encoding="utf-8").splitlines():
            name, *fields = line.split()
            if name in self._names:
                user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields[:8])
                busy += user + nice + system + irq + softirq + steal
        own = sum(_cpu_ticks(pid) for pid in {os.getpid(), *tree(self._engine)})
        return (busy - own) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    user, system = stat.rpartition(")")[2].split()[11:13]
    return int(user) + int(system)
