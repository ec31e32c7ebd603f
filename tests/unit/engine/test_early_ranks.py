"""Processes of ranks that start before it is known what they begin with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import toy_ranks
from toy_ranks import toy_group

from octavo.engine.rank_process import EarlyRanks


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_ranks.__file__).parent), prepend=os.pathsep)


def test_ranks_take_the_processes_that_wait() -> None:
    with EarlyRanks("toy_ranks", (), [{}, {}]) as early:
        waiting = [child.process.pid for child in early.waiting]
        group = toy_group(2, early=early)
        assert [process.pid for process in group.processes] == waiting
        assert not early.waiting
    assert [process.code for process in group.processes] == [None, None]
    group.close()
    assert [process.code for process in group.processes] == [0, 0]


def test_what_was_not_taken_is_ended() -> None:
    with EarlyRanks("toy_ranks", (), [{}]) as early:
        (child,) = early.waiting
    assert child.process.returncode is not None
    assert not early.waiting


@pytest.mark.parametrize(
    ("arguments", "environment"), [(("cuda",), {}), ((), {"CUDA_VISIBLE_DEVICES": "7"})], ids=["arguments", "variables"]
)
def test_a_process_that_began_otherwise_is_not_taken(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    with EarlyRanks("toy_ranks", arguments, [environment]) as early:
        (waiting,) = early.waiting
        group = toy_group(1, early=early)
        assert group.processes[0].pid != waiting.process.pid
        group.close()


def test_a_change_of_variables_since_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with EarlyRanks("toy_ranks", (), [{}]) as early:
        (waiting,) = early.waiting
        monkeypatch.setenv("NEW_VARIABLE", "1")
        group = toy_group(1, early=early)
        assert group.processes[0].pid != waiting.process.pid
        group.close()
