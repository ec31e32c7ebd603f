"""An engine core's process with the real loop on the toy device: `CoreProcess("toy_core", STEP)`.

The device is lost at that step. `PYTHONPATH` must hold this folder.
"""

from __future__ import annotations

import os
import sys

from octavo.cache.cache import KVCache
from octavo.core.info import ModelInfo
from octavo.engine.core_server import LOST, CoreServer
from octavo.engine.fake import fake_info
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase
from octavo.engine.process import receive_payload
from octavo.engine.toy import ToyDevice
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCKS, BLOCK_SIZE = 2048, 4
SLOTS = 8


def main() -> int:
    listener, lost_at = receive_payload()

    def make(on_phase: OnPhase) -> tuple[EngineLoop, ModelInfo]:
        limits = Limits(max_num_seqs=SLOTS, max_num_batched_tokens=64, max_model_len=1000, max_ahead=2)
        scheduler = Scheduler(KVCache(BLOCKS, BLOCK_SIZE), limits, make_policy("fcfs"))
        info = fake_info(name="stub", vocab_size=257, eos_token_ids=[], max_model_len=1000)
        return EngineLoop(scheduler, ToyDevice(BLOCKS, BLOCK_SIZE, lost_at=lost_at), depth=1), info

    code = CoreServer(listener).run(make)
    print("the core ends with", code, file=sys.stderr, flush=True)
    if code == LOST:
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
