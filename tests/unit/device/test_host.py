"""What limits this process: control groups of both versions, wherever they are set, and its address space."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from octavo.device import cgroup, host

Groups = Callable[[str, Mapping[str, Mapping[str, object]]], None]
UNLIMITED = 9223372036854771712
"""What version 1 says where there is no limit."""


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Makes a machine's control groups: this process's own, and the files of each folder."""

    def make(own: str, folders: Mapping[str, Mapping[str, object]]) -> None:
        (tmp_path / "own").write_text(own)
        for folder, files in folders.items():
            (tmp_path / "fs" / folder).mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                (tmp_path / "fs" / folder / name).write_text(f"{value}\n")
        monkeypatch.setattr(cgroup, "_OWN", tmp_path / "own")
        monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "fs")

    return make


def second(limit: object, used: int, inactive: int) -> dict[str, object]:
    """A group's memory in version 2."""
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {inactive}\nslab 1"}


def first(limit: int, used: int, inactive: int) -> dict[str, object]:
    """The same in version 1."""
    stat = f"inactive_file 3\ntotal_inactive_file {inactive}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


SERVICE = "system.slice/octavo.service"


@pytest.mark.parametrize(
    ("own", "folders", "left"),
    [
        ("0::/", {"": second(1000, 300, 50)}, 750),  # a container
        ("0::/docker/1a", {"": second(1000, 300, 50)}, 750),  # one that is told the host's name of its group
        ("0::/" + SERVICE, {SERVICE: second(1000, 300, 50), "": {"memory.stat": ""}}, 750),
        ("0::/" + SERVICE, {SERVICE: second("max", 300, 50), "system.slice": second(900, 400, 0)}, 500),
        ("0::/" + SERVICE, {SERVICE: second(1000, 300, 0), "system.slice": second(900, 400, 0)}, 500),
        ("0::/", {"": second(1000, 1200, 0)}, 0),
        ("0::/", {"": second("max", 300, 50)}, None),
        ("0::/", {}, None),
        ("", {}, None),
        ("4:memory:/a/b\n1:cpu:/c\n0::/", {"memory/a/b": first(1000, 300, 50), "memory": first(2000, 0, 0)}, 750),
        ("4:cpuset,memory:/a", {"memory/a": first(UNLIMITED, 300, 50), "memory": first(1000, 900, 0)}, 100),
    ],
)
def test_memory_is_what_all_groups_leave(
    own: str, folders: Mapping[str, Mapping[str, object]], left: int | None, groups: Groups
) -> None:
    groups(own, folders)
    assert cgroup.memory_left() == left


@pytest.mark.parametrize(
    ("own", "folders", "quota"),
    [
        ("0::/", {"": {"cpu.max": "150000 100000"}}, 1.5),
        ("0::/a/b", {"a/b": {"cpu.max": "max 100000"}, "a": {"cpu.max": "200000 50000"}}, 4.0),
        ("0::/a", {"a": {"cpu.max": "max 100000"}}, None),
        (
            "3:cpu,cpuacct:/a",
            {
                "cpu/a": {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000},
                "cpu": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000},
            },
            0.5,
        ),
        ("3:cpuset:/a", {"cpu": {"cpu.cfs_quota_us": 50000, "cpu.cfs_period_us": 100000}}, None),
    ],
)
def test_processors_are_what_all_groups_leave(
    own: str, folders: Mapping[str, Mapping[str, object]], quota: float | None, groups: Groups
) -> None:
    groups(own, folders)
    assert cgroup.cpu_quota() == quota
    assert host.physical_cores() >= 1
    if quota is not None:
        assert host.physical_cores() <= max(1, quota)


@pytest.mark.parametrize(
    ("own", "folders", "most"),
    [
        ("0::/a/b", {"a/b": {"pids.max": "max"}, "a": {"pids.max": 300}, "": {"pids.max": 9000}}, 300),
        ("2:pids:/c", {"pids/c": {"pids.max": 64}}, 64),
        ("0::/", {"": {"pids.max": "max"}}, None),
    ],
)
def test_processes_are_what_all_groups_allow(
    own: str, folders: Mapping[str, Mapping[str, object]], most: int | None, groups: Groups
) -> None:
    groups(own, folders)
    assert cgroup.most_processes() == most


def test_the_least_of_all_limits_counts(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    groups("0::/", {"": second(1 << 40, 0, 0)})
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    free = host.available_memory()
    assert 0 < free < 1 << 40
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + (160 << 20),) * 2)  # 128 MiB stay for threads
    assert host.available_memory() <= 32 << 20
    groups("0::/", {"": second(5000, 1000, 0)})
    assert host.available_memory() == 4000


@pytest.mark.parametrize(
    ("quota", "overlapping", "expected"), [(None, False, 8), (None, True, 4), (6.0, False, 3), (6.0, True, 3)]
)
def test_ranks_divide_the_cores_and_the_quota(
    quota: float | None, overlapping: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9000, 9008)))
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    assert host.physical_cores(2, overlapping=overlapping) == expected
