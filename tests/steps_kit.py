"""An engine on the toy device whose steps, rows and features can be made to fail."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cache.cache import KVCache
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.hooks import EngineHook
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Limits, Scheduler

BLOCK = 4


class Engine:
    def __init__(self, device: ToyDevice, depth: int = 0, hooks: Sequence[EngineHook] = (), **limits) -> None:
        bounds = Limits(
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=256,
            max_ahead=depth + 1,
            **limits,
        )
        self.scheduler = Scheduler(KVCache(64, BLOCK), bounds, make_policy("fcfs"), hooks=hooks)
        self.loop = EngineLoop(self.scheduler, device, depth)
        self.deltas = []

    def ask(self, name, prompt, options=None, **params):
        sampling = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": 0, **params})
        self.loop.add(GenerateRequest(id=name, tokens=list(prompt), params=sampling, options=options or {}))

    def run(self):
        while self.loop.busy:
            self.deltas += self.loop.step()
        self.scheduler.check_idle()
        return self

    def outputs(self, name):
        found = {}
        for delta in self.deltas:
            if delta.id == name:
                found.setdefault(delta.index, []).extend(delta.tokens)
        return found

    def ends(self):
        return {(delta.id, delta.index): delta for delta in self.deltas if delta.finish is not None}
