"""Several ranks are one: all get each message, all answer calls, and the loss of one is the loss of all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import toy_ranks
from toy_ranks import Script

from octavo.core.errors import DeviceLostError
from octavo.core.output import StepOutput
from octavo.engine.multiproc import RankBuild, RankExecutor
from octavo.engine.phases import PhaseTimer
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank_group import RankError, RankGroup

Make = Callable[..., RankGroup]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", str(Path(toy_ranks.__file__).parent), prepend=os.pathsep)
    made: list[RankGroup] = []

    def start(size: int, script: Script | None = None, timeout_s: float | None = None) -> RankGroup:
        made.append(toy_ranks.toy_group(size, script, timeout_s))
        return made[-1]

    yield start
    for group in made:
        group.kill()
        assert all(process.code is not None for process in group.processes)


def computed(group: RankGroup, step: int) -> StepOutput:
    executor = RankExecutor(group, PlanCodec({}))
    launched = executor.forward(toy_ranks.plan(step))
    executor.sample(launched, {})
    return launched.result()


def compute_all(group: RankGroup) -> None:
    for step in range(100_000):
        computed(group, step)


def test_all_compute_and_rank_0_answers(make: Make) -> None:
    group = make(3)
    assert [computed(group, step).tokens for step in range(4)] == [[[0, step]] for step in range(4)]
    assert group.call(bool, "failed", 2) == [False] * 3
    group.close()
    assert [process.code for process in group.processes] == [0, 0, 0]


@pytest.mark.parametrize("time", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    ("how", "said"), [("SIGKILL", "was killed by SIGKILL"), ("SIGSTOP", r"was stopped by a signal \(SIGSTOP\)")]
)
def test_a_lost_rank_is_the_loss_of_all(make: Make, rank: int, how: str, said: str, time: int) -> None:
    """Its number, how it ended and its last lines are in one error, and no process is left."""
    group = make(2, {rank: (2, how)}, timeout_s=30)
    with pytest.raises(DeviceLostError, match=rf"The device was lost: rank {rank}: its process {said}") as lost:
        compute_all(group)
    assert lost.value.__notes__ == [f"Its last log lines:\nrank {rank}: {how} at step 2"]
    for use in (group.check, lambda: group.call(bool, "failed", 0), lambda: computed(group, 1)):
        with pytest.raises(DeviceLostError, match=f"rank {rank}"):
            use()


def test_a_rank_that_hangs_while_nothing_runs_is_missed(make: Make) -> None:
    group = make(2)
    os.kill(group.processes[1].pid, signal.SIGSTOP)
    with pytest.raises(DeviceLostError, match="rank 1: its process was stopped"):
        group.call(bool, "failed", 0)


def test_a_step_that_no_rank_finishes_in_time_ends_all(make: Make) -> None:
    group = make(1, {0: (1, "SIGSTOP")}, timeout_s=0.2)  # stopped, but for less time than the watch allows
    computed(group, 0)
    with pytest.raises(DeviceLostError, match=r"step 1 was not finished within 0.2 s \(--rank-timeout\)"):
        computed(group, 1)


def test_a_step_that_fails_everywhere_is_recovered_from(make: Make) -> None:
    group = make(2, {0: (1, "fail"), 1: (1, "fail")})
    with pytest.raises(RankError, match="rank 0: RuntimeError: a planted fault"):
        computed(group, 1)
    assert computed(group, 2).tokens == [[0, 2]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_in_one_rank_only_ends_all(make: Make, rank: int) -> None:
    group = make(2, {rank: (1, "fail")})
    with pytest.raises(DeviceLostError, match=rf"rank {rank}: step 1 failed .*: RuntimeError: a planted fault"):
        compute_all(group)


def test_ranks_that_differ_after_a_call_are_lost(make: Make) -> None:
    group = make(2)
    with pytest.raises(RankError, match="rank 1: RuntimeError: no memory"):
        group.call(type(None), "sleep", 1)
    with pytest.raises(DeviceLostError, match="only some of the ranks failed: rank 1: RuntimeError: no memory"):
        group.call(type(None), "sleep", 1, together=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_to_start_does_not_leave_the_others_waiting_for_it(make: Make, rank: int) -> None:
    group = make(2, {rank: (-1, "refuses"), 1 - rank: (-1, "waits")}, timeout_s=3600)
    build = RankBuild(group, PlanCodec({}))
    with pytest.raises(RankError, match=f"rank {rank}: RuntimeError: no memory"):
        build.load(PhaseTimer(lambda name, seconds: None))


def test_a_rank_that_waits_for_one_that_failed_a_call_is_missed(make: Make) -> None:
    group = make(2, {0: (-1, "waits"), 1: (-1, "refuses")}, timeout_s=0.1)
    said = r"rank 0: it did not end within 0.1 s \(--rank-timeout\) what another rank failed: .* no memory"
    with pytest.raises(DeviceLostError, match=said):
        group.call(type(None), "wake_up", "weights", together=True)


def test_the_last_lines_of_a_rank_are_known_even_if_the_log_takes_none(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        group = make(2, {1: (2, "SIGKILL")}, timeout_s=30)
        with pytest.raises(DeviceLostError, match="rank 1") as lost:
            compute_all(group)
        assert lost.value.__notes__ == ["Its last log lines:\nrank 1: SIGKILL at step 2"]
        group.kill()
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_no_descriptor_is_left(make: Make) -> None:
    before = set(os.listdir("/proc/self/fd"))
    group = make(2)
    group.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_rank_may_report_a_failure_while_reports_are_read() -> None:
    """Threads that listen to other ranks add reports."""
    failures: dict[int, tuple[int, str, float]] = {}

    class Number(int):
        """A step's number, at whose comparison another report arrives."""

        def __le__(self, other: int) -> bool:
            failures[10] = 1, "late", 0.0
            return super().__le__(other)

    failures |= {Number(8): (1, "early", 0.0), Number(9): (1, "early", 0.0)}
    group = RankGroup.__new__(RankGroup)
    group._failures = failures
    group._check_agreed(5)
    assert 10 in failures
