"""The measurement of steps, on a toy device."""

from __future__ import annotations

import pytest

from octavo.cache.cache import KVCache
from octavo.core.cache_groups import FULL
from octavo.core.errors import ConfigError
from octavo.engine.loop import EngineLoop
from octavo.engine.toy import ToyDevice
from octavo.schedule.hooks import EngineHook
from octavo.schedule.limits import Limits
from octavo.schedule.policy import make_policy
from octavo.schedule.scheduler import Scheduler
from octavo.simulate.measure import Meter, StepTimer
from octavo.simulate.model import fit

BLOCKS, SIZE = 128, 4


def meter(depth: int = 0, hooks: tuple[EngineHook, ...] = (), seconds: float = 60.0) -> Meter:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128, max_ahead=depth + 1)
    scheduler = Scheduler(KVCache(BLOCKS, SIZE), limits, make_policy("fcfs"), hooks=hooks)
    loop = EngineLoop(scheduler, ToyDevice(BLOCKS, SIZE), depth)
    return Meter(loop, limits, BLOCKS * SIZE, 50, StepTimer(FULL), depth > 0, seconds)


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_of_all_kinds_and_sizes_are_measured(depth: int) -> None:
    one = meter(depth)
    steps = one.sizes(2, lambda text: None)
    one.loop.check_idle()
    shapes = [step.shape for step in steps]
    assert {shape.tokens for shape in shapes if shape.decodes} >= {1, 2, 4, 8}
    assert {shape.tokens for shape in shapes if not shape.decodes} >= {2, 4, 8, 16, 32}
    assert any(shape.sampled > 1 and not shape.decodes for shape in shapes)
    assert all(step.seconds > 0 for step in steps)
    fit(steps)
    assert any(step.shape.sampled > 1 for step in one.mixed())


def test_a_used_up_time_leaves_out_the_largest_only() -> None:
    shapes = [step.shape for step in meter(seconds=1e-9).sizes(1, lambda text: None)]
    assert {shape.decodes for shape in shapes} == {True, False}
    assert max(shape.tokens for shape in shapes) < 32


def test_an_engine_that_drafts_is_refused() -> None:
    class Drafter(EngineHook):
        name = "drafter"
        max_drafts = 2

    with pytest.raises(ConfigError, match="--spec-method none"):
        meter(hooks=(Drafter(),)).sizes(1, lambda text: None)
