"""An engine core's process with the real loop on the toy device: `CoreProcess("toy_core", CROWD)`.

The device is lost once so many requests are there. `PYTHONPATH` must hold this folder.
"""

from __future__ import annotations

import os
import sys

from octavo.cache.cache import KVCache
from octavo.core.info import ModelInfo
from octavo.core.plan import StepPlan
from octavo.engine.core_server import LOST, CoreServer
from octavo.engine.fake import fake_info
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase
from octavo.engine.process import receive_payload
from octavo.engine.toy import ToyDevice, ToyStep
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCKS, BLOCK_SIZE = 2048, 4
SLOTS = 8


class Doomed(ToyDevice):
    def __init__(self, scheduler: Scheduler, crowd: int) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE)
        self._scheduler, self._crowd = scheduler, crowd

    def forward(self, plan: StepPlan) -> ToyStep:
        stats = self._scheduler.stats()
        if stats.num_running + stats.num_waiting >= self._crowd:
            self._lost_at = plan.id
        return super().forward(plan)


def main() -> int:
    listener, crowd = receive_payload()

    def make(on_phase: OnPhase) -> tuple[EngineLoop, ModelInfo]:
        limits = Limits(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=1000, max_ahead=2)
        scheduler = Scheduler(KVCache(BLOCKS, BLOCK_SIZE), limits, make_policy("fcfs"))
        info = fake_info(name="stub", vocab_size=257, eos_token_ids=[], max_model_len=1000)
        return EngineLoop(scheduler, Doomed(scheduler, crowd), depth=1), info

    code = CoreServer(listener).run(make)
    print("the core ends with", code, file=sys.stderr, flush=True)
    if code == LOST:
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
