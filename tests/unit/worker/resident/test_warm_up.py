"""The steps of a warm-up are no longer than a step may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from octavo.core.plan import StepPlan
from octavo.worker.resident.warm_up import warm_up


@pytest.mark.parametrize("most", [8, 12, 100, 4096])
@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_no_step_exceeds_the_limit(most: int, num_slots: int) -> None:
    steps: list[StepPlan] = []

    def forward(plan: StepPlan) -> Any:
        steps.append(plan)
        return SimpleNamespace(result=lambda: None)

    runner: Any = SimpleNamespace(forward=forward, sample=lambda step, payload: None)
    slots: Any = SimpleNamespace(num_slots=num_slots, max_model_len=1000, block_tables=[None], tree=None)
    warm_up(runner, slots, most)
    assert max(plan.total_tokens for plan in steps) <= most
    assert max(len(plan.slots) for plan in steps) == num_slots
    assert max(plan.total_tokens for plan in steps) == min(most, 999 * max(1, min(most // 999, num_slots)))
