"""Which cores are chosen, on machines described by folders."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.device.binding import bind, format_cores, parse_cores
from octavo.device.visible import check_enough, environment_of

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def affinity(monkeypatch):
    """A machine on which this process may use the cores 0 to 7; returns what was set."""
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: chosen.append(set(cores)))
    return chosen


def machine(path, *nodes):
    for i, cores in enumerate(nodes):
        (path / f"node{i}").mkdir()
        (path / f"node{i}" / "cpulist").write_text(cores + "\n")
    return path


def test_lists_are_read_and_written():
    assert parse_cores("0-3,8") == {0, 1, 2, 3, 8}
    assert format_cores({8, 0, 1, 2, 3}) == "0-3,8"
    for text in ("", "a", "3-1", "-1", "1,,2"):
        with pytest.raises(ValueError):
            parse_cores(text)


def test_auto_takes_the_node_of_which_there_is_most(tmp_path, affinity):
    bind("auto", machine(tmp_path, "0-2", "3-15", ""))
    assert affinity == [{3, 4, 5, 6, 7}]


def test_one_node_is_left_alone(tmp_path, affinity):
    bind("auto", machine(tmp_path, "0-7"))
    bind("auto", tmp_path / "nothing")
    bind("nobind")
    assert affinity == []


@pytest.mark.parametrize(
    ("nodes", "size", "expected"),
    [
        (("0-7",), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (("0-3", "4-7"), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (("0-3", "4-7"), 4, [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (("0-1", "2-3", "4-5", "6-7"), 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ((), 3, [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
    ],
)
def test_ranks_take_a_node_each_or_divide_the_cores(tmp_path, affinity, nodes, size, expected):
    folder = machine(tmp_path, *nodes)
    for rank in range(size):
        bind("auto", folder, rank, size)
    assert affinity == expected


def test_more_ranks_than_cores_are_reported_once(tmp_path, affinity, caplog):
    for rank, size in ((0, 8), (1, 9), (0, 9)):
        bind("auto", tmp_path, rank, size)
    assert [record.getMessage().partition(",")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "9 ranks share 8 cores"
    ]


def test_each_rank_has_its_own_list(affinity):
    for rank in range(2):
        bind("0,1|2-3", rank=rank, size=2)
    assert affinity == [{0, 1}, {2, 3}]
    with pytest.raises(ConfigError, match="one list of cores for each of 3 ranks"):
        bind("0,1|2-3", rank=0, size=3)


def test_each_rank_sees_its_own_gpu():
    assert [environment_of(rank, 2, environment={}) for rank in range(2)] == [{VISIBLE: "0"}, {VISIBLE: "1"}]
    assert [environment_of(rank, 2, environment={VISIBLE: "5, GPU-9"})[VISIBLE] for rank in range(2)] == ["5", "GPU-9"]
    assert environment_of(1, 2, environment={VISIBLE: "5"}) == {VISIBLE: ""}, "none is left"
    assert environment_of(0, 1, environment={VISIBLE: "5,6"}) == {}
    assert environment_of(1, 2, 2, {}) == {VISIBLE: "2,3"}, "of a replica of two ranks"


def test_a_list_is_taken_as_it_is(affinity):
    bind("1,4-5")
    assert affinity == [{1, 4, 5}]


@pytest.mark.parametrize(("text", "words"), [("x", "list of cores like"), ("6-9", "8-9, which this process may not")])
def test_what_cannot_be_is_refused(affinity, text, words):
    with pytest.raises(ConfigError, match=words):
        bind(text)
    assert affinity == []


def test_ranks_on_one_node_share_no_physical_core(tmp_path, affinity):
    nodes = tmp_path / "node"
    nodes.mkdir()
    machine(nodes, "0-7")
    for core in range(8):
        topology = tmp_path / "cpu" / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    for rank in range(2):
        bind("auto", nodes, rank, 2)
    assert affinity == [{0, 1, 4, 5}, {2, 3, 6, 7}]


@pytest.mark.parametrize(
    ("needed", "stated", "says"),
    [
        (3, None, "-tp 3 needs 3 GPUs, but this machine has 2. Lower the number"),
        (2, "1", "-tp 3 needs 2 GPUs, but CUDA_VISIBLE_DEVICES=1 names 1"),
        (2, None, ""),
        (2, "0,0", ""),
        (4, "", ""),  # the model runs on the CPU
    ],
)
def test_more_gpus_than_there_are_are_refused(needed: int, stated: str | None, says: str, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    refused = pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext()
    with refused:
        check_enough(needed, "-tp 3", environment={} if stated is None else {VISIBLE: stated}, devices=tmp_path)


def test_gpus_that_can_not_be_counted_are_not_refused(tmp_path: Path) -> None:
    check_enough(2, "-tp 2", environment={}, devices=tmp_path)
