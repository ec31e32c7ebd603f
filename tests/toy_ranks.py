"""A rank without a model or torch, which does what a test asks of it: `RankProcess("toy_ranks", script, ...)`.

`PYTHONPATH` must hold this folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from typing import Any

from octavo.core.output import StepOutput
from octavo.core.pausing import SleepTag
from octavo.core.plan import StepPlan
from octavo.core.worker_info import LoadedFacts, WorkerFacts
from octavo.engine.executor import FixedWorker
from octavo.engine.plan_codec import PlanCodec
from octavo.engine.rank import RankServer
from octavo.engine.rank_group import RankGroup
from octavo.engine.rank_process import EarlyRanks, RankProcess, RankStart
from octavo.engine.ring import RingHandles

Script = dict[int, tuple[int, str]]
"""Rank -> the step at which it misbehaves, and how: "fail", or the name of a signal that it sends itself. A rank that
"refuses" fails to load and to wake up, and one that "waits" does neither, as if for the other's part of a sum."""

FACTS = WorkerFacts(
    device="a toy",
    accelerator="cpu",
    torch_device="cpu",
    default_depth=0,
    default_limits=(8, 64, 64),
    balanced_tokens=8,
    dtype="float32",
    vocab_size=8,
    hidden_size=8,
    max_position=64,
)


class ToyStep:
    def __init__(self, plan: StepPlan, number: int) -> None:
        self.plan, self._number = plan, number

    def result(self) -> StepOutput:
        return StepOutput([[self._number, self.plan.id]])


class ToyRank(FixedWorker):
    """Build, worker and executor in one."""

    facts = FACTS

    def __init__(self, number: int, script: Script) -> None:
        self._number = number
        self._at, self._how = script.get(number, (-1, ""))

    def load(self, *args: Any) -> LoadedFacts:
        self._meet()
        return LoadedFacts(weight_bytes=0, weight_form="")

    def wake_up(self, part: SleepTag) -> None:
        self._meet()

    def _meet(self) -> None:
        if self._how == "refuses":
            raise RuntimeError("no memory")
        if self._how == "waits":
            threading.Event().wait()

    def allocate(self, sizes: Any) -> ToyRank:
        return self

    def executor(self) -> ToyRank:  # type: ignore[override]
        return self

    def sleep(self, level: int) -> None:
        if level == self._number:
            raise RuntimeError("no memory")

    def forward(self, plan: StepPlan) -> ToyStep:
        if plan.id == self._at:
            print(f"rank {self._number}: {self._how} at step {plan.id}", file=sys.stderr, flush=True)
            if self._how == "fail":
                raise RuntimeError("a planted fault")
            os.kill(os.getpid(), signal.Signals[self._how])
        return ToyStep(plan, self._number)

    def sample(self, step: ToyStep, payload: dict[str, Any]) -> None: ...


def plan(number: int) -> StepPlan:
    return StepPlan(number, [], [], [], [], [], [], [])


def toy_group(
    size: int, script: Script | None = None, timeout_s: float | None = None, early: EarlyRanks | None = None
) -> RankGroup:
    """Start ranks, up to the executor."""

    def start(number: int, ring: RingHandles) -> RankProcess:
        given = number, script or {}
        return RankProcess("toy_ranks", given, ring, number=number, prefix=f"[rank {number}] ", early=early)

    group = RankGroup(size, start, timeout_s)
    group.call(WorkerFacts, "begin")
    group.call(bool, "allocate", {"num_blocks": 1, "num_slots": 1, "max_model_len": 8, "max_step_tokens": 8})
    group.call(tuple[str, str], "executor")
    return group


def main() -> int:
    peer, ring, (number, script), _ = RankStart().receive()
    return RankServer(peer, ring, partial(ToyRank, number, script), PlanCodec({}), answers=number == 0).run()


if __name__ == "__main__":
    sys.exit(main())
