"""Drafts in the slots of both kinds: where they lie, what a batch reads of them, and what is kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.worker.drafts import DraftRows, Drafts
from octavo.worker.slots import HostSlots

SLOTS, LENGTH, PAGE, VOCAB, MOST = 3, 40, 4, 50, 4


def host() -> Any:
    return HostSlots(SLOTS, LENGTH, PAGE, VOCAB)


def device() -> Any:
    pytest.importorskip("triton")
    from octavo.worker.resident.slots import DeviceSlots

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return DeviceSlots(SLOTS, LENGTH, PAGE, VOCAB, where, drafts=True)


def accept(slots: Any, plan: StepPlan, drawn: list[int]) -> list[int]:
    if isinstance(slots, HostSlots):
        return slots.accept(plan, torch.tensor(drawn).numpy())[0]
    _, kept, settle, _ = slots.drafts.accept(plan, torch.tensor(drawn, dtype=torch.int32, device=slots.device))
    settle(kept.tolist())
    found: list[int] = kept.tolist()
    return found


def known(slots: Any, slot: int) -> list[int]:
    found: list[int] = slots.tokens[slot, : int(slots.length[slot])].tolist()
    return found


def step(number: int, drafts: list[int], order: list[int], proposals: dict[int, int]) -> StepPlan:
    counts = [1 + count for count in drafts]
    rows: Any = [True] * len(order), [], []
    return StepPlan(number, [], order, counts, drafts, *rows, proposals=proposals, reports_drafts=number % 2 == 0)


@pytest.mark.parametrize("make", [host, device])
def test_lives_of_drafts(make: Any) -> None:
    """Against plain lists: limits, counts below them, tokens that don't exist, drafts that are dropped."""
    rng = random.Random(4)
    slots = make()
    truth = [[rng.randrange(VOCAB) for _ in range(rng.randrange(2, 6))] for _ in range(SLOTS)]
    blocks = [list(range(10 * slot, 10 * slot + 10)) for slot in range(SLOTS)]
    params = SamplingParams(temperature=0)
    new = [NewRow(slot, truth[slot], 2, params, 0, [], len(truth[slot]) - 1, [blocks[slot]]) for slot in range(SLOTS)]
    slots.apply(StepPlan(0, new, [], [], [], [], [], []))
    waiting: list[list[int]] = [[] for _ in range(SLOTS)]
    limits = [0] * SLOTS
    for number in range(1, 8):
        order = rng.sample(range(SLOTS), SLOTS)
        drafts = [rng.randint(0, limits[slot]) for slot in order]
        limits = [rng.randint(0, MOST) for _ in range(SLOTS)]
        plan = step(number, drafts, order, {row: limits[slot] for row, slot in enumerate(order) if limits[slot]})
        layout = slots.lay_out(plan)
        ids, positions = layout.input.input_ids.tolist(), layout.input.positions.tolist()
        assert (layout.rows if isinstance(layout.rows, list) else layout.rows.tolist()) == plan.logit_slots
        assert layout.input.logit_rows.tolist() == list(range(len(ids))) == DraftRows.of(plan).tokens.tolist()
        slots.advance(plan, layout)
        drawn, expected, start = [], [], 0
        for slot, count in zip(order, drafts, strict=True):
            read = ids[start : start + 1 + count]
            assert read[: 1 + len(waiting[slot][:count])] == [truth[slot][-1], *waiting[slot][:count]]
            assert all(0 <= token < VOCAB for token in read)
            assert positions[start : start + 1 + count] == [len(truth[slot]) - 1 + i for i in range(1 + count)]
            mine = [*waiting[slot][:count], *[rng.randrange(VOCAB)] * (1 + count - len(waiting[slot][:count]))]
            mine = [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in mine]
            kept = 1
            while kept <= len(waiting[slot][:count]) and mine[kept - 1] == waiting[slot][kept - 1]:
                kept += 1
            drawn += mine
            expected.append(kept)
            truth[slot] = truth[slot] + mine[:kept]
            start += 1 + count
        if any(drafts):
            assert accept(slots, plan, drawn) == expected
        elif isinstance(slots, HostSlots):
            slots.append(order, torch.tensor(drawn).numpy())
        else:
            slots.append(layout.rows, torch.tensor(drawn, dtype=torch.int32, device=slots.device))
        assert [known(slots, slot) for slot in range(SLOTS)] == truth
        assert slots.computed[:SLOTS].tolist() == [len(one) - 1 for one in truth]
        waiting = [[] for _ in range(SLOTS)]
        if plan.proposals:
            drafting = slots.drafting(plan)
            width = rng.randrange(1, MOST + 2)
            tokens = torch.randint(-3, VOCAB + 3, (len(drafting.rows), width))
            counts = torch.randint(0, width + 1, (len(drafting.rows),))
            stored = slots.draft(drafting, Drafts(tokens.to(slots_device(slots)), counts.to(slots_device(slots))))()
            for row, one, count in zip(drafting.rows, tokens.tolist(), counts.tolist(), strict=True):
                waiting[order[row]] = [min(max(t, 0), VOCAB - 1) for t in one[: min(count, plan.proposals[row])]]
            assert stored.counts == {row: len(waiting[order[row]]) for row in drafting.rows}
            assert stored.tokens == ({row: waiting[order[row]] for row in drafting.rows} if plan.reports_drafts else {})
    if not isinstance(slots, HostSlots):
        assert slots.past(step(9, [0] * SLOTS, list(range(SLOTS)), {})).tolist() == [len(one) - 1 for one in truth]


def slots_device(slots: Any) -> torch.device:
    return torch.device("cpu") if isinstance(slots, HostSlots) else slots.device
