"""Requests are freed when they have ended, without the garbage collector: an engine's process collects rarely."""

from __future__ import annotations

import gc

import pytest

from octavo.cache.cache import KVCache
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.policy import make_policy
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Limits, Scheduler


def alive() -> int:
    """Return the number of requests, without those that were frozen."""
    return sum(type(one) is Request for one in gc.get_objects())


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_holds_a_request_that_has_ended(depth: int) -> None:
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=60)
    loop = EngineLoop(Scheduler(KVCache(20, 4), limits, make_policy("fcfs")), ToyDevice(20, 4), depth)
    gc.freeze()  # what other tests left, and the million objects of all test modules, need not be looked through
    gc.disable()
    try:
        for number in range(12):
            params = SamplingParams(max_tokens=10, n=1 + number % 3, seed=number)
            loop.add(GenerateRequest(id=f"{number}", tokens=[1 + number] * 9, params=params))
        for _ in range(4):
            loop.step()
        assert alive() > 0
        for number in (0, 1, 10, 11):  # some run, others wait
            loop.abort(f"{number}")
        loop.abort("5", 1)
        while loop.busy:
            loop.step()
        loop.check_idle()
        assert alive() == 0
    finally:
        gc.enable()
        gc.unfreeze()
