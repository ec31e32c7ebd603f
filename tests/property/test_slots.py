"""A plan becomes the same batch wherever running requests live, and blocks are copied as if one after the other."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.cache_groups import NO_BLOCK, CacheGroup
from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, SampledRow, StepPlan
from octavo.device.cpu import CpuDevice
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.worker.blocks import Blocks
from octavo.worker.slots import HostSlots

SLOTS, LENGTH, PAGE, VOCAB = 4, 40, 4, 50


@st.composite
def plans(draw: Any, groups: int = 1) -> list[StepPlan]:
    """Steps in which requests come, compute parts of their prompts or single tokens, and are replaced by others.

    Without all of their blocks in front, in the groups after the first.
    """
    left = [0] * SLOTS
    known: list[list[int]] = [[] for _ in range(SLOTS)]
    made = []
    for step in range(draw(st.integers(1, 5))):
        new = []
        for slot in range(SLOTS):
            if not left[slot] and draw(st.booleans()):
                tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LENGTH - 6))
                computed = draw(st.integers(0, len(tokens) - 1))
                blocks = [
                    [1000 * group + 10 * slot + i + 100 * step for i in range(-(-LENGTH // PAGE))]
                    for group in range(groups)
                ]
                for table in blocks[1:]:
                    table[: computed // PAGE] = [NO_BLOCK] * (computed // PAGE)
                reports = draw(st.sampled_from([None, 2]))
                params = SamplingParams(temperature=0, prompt_logprobs=reports)
                new.append(NewRow(slot, tokens, len(tokens), params, 0, [], computed, blocks))
                left[slot], known[slot] = len(tokens) - computed, tokens
        rows = [slot for slot in draw(st.permutations(range(SLOTS))) if left[slot]]
        if not rows:
            continue
        counts = [draw(st.integers(1, left[slot])) for slot in rows]
        for slot, count in zip(rows, counts, strict=True):
            left[slot] -= count
        samples = [not left[slot] for slot in rows]
        writes = [
            (slot, group, draw(st.integers(0, 9)), 7 + slot)
            for slot in rows
            for group in range(groups)
            if draw(st.booleans())
        ]
        made.append(StepPlan(step, new, rows, counts, [0] * len(rows), samples, writes, []))
    return made


class Truth:
    """What each slot holds, in plain lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.blocks: dict[int, list[list[int]]] = {}

    def apply(self, plan: StepPlan) -> None:
        for row in plan.new:
            self.tokens[row.slot], self.computed[row.slot] = row.tokens, row.num_computed
            self.blocks[row.slot] = [list(table) for table in row.blocks]
        for slot, group, index, block in plan.block_writes:
            self.blocks[slot][group][index] = block

    def cells(self, plan: StepPlan, group: int) -> list[int]:
        """Where the KV of a batch goes that is not yet computed."""
        found = []
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            for position in range(self.computed[slot], self.computed[slot] + count):
                found.append(self.blocks[slot][group][position // PAGE] * PAGE + position % PAGE)
        return found

    def batch(self, plan: StepPlan) -> dict[str, list[int]]:
        """The fields of `StepInput`, token by token."""
        ids, positions, starts, lens, rows = [], [], [0], [], []
        for slot, count, samples in zip(plan.slots, plan.num_tokens, plan.samples, strict=True):
            for position in range(self.computed[slot], self.computed[slot] + count):
                ids.append(self.tokens[slot][position])
                positions.append(position)
            starts.append(len(ids))
            lens.append(self.computed[slot] + count)
            if samples:
                rows.append(len(ids) - 1)
            self.computed[slot] += count
        return {
            "input_ids": ids,
            "positions": positions,
            "query_start": starts,
            "seq_lens": lens,
            "logit_rows": rows,
        }


def check(slots: Any, steps: list[StepPlan], groups: int = 1) -> None:
    truth = Truth()
    for plan in steps:
        slots.apply(plan)
        truth.apply(plan)
        before = dict(truth.computed)
        layout, prompts = slots.lay_out(plan), slots.prompt_rows(plan)
        for group in range(groups):
            step = layout.input.of(group)
            assert step.slot_mapping.tolist() == truth.cells(plan, group)
            for row, slot in enumerate(plan.slots):
                table = step.block_tables[row if step.table_rows is None else step.table_rows[row]].tolist()
                wanted = [max(block, 0) for block in truth.blocks[slot][group]]
                assert table == wanted[: len(table)]
        expected = truth.batch(plan)
        assert {name: getattr(layout.input, name).tolist() for name in expected} == expected
        assert layout.input.max_query_len == max(plan.num_tokens)
        assert layout.input.max_seq_len == max(expected["seq_lens"])
        sampled = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        assert (layout.rows if isinstance(layout.rows, list) else layout.rows.tolist()) == sampled
        for prompt in prompts:
            slot = plan.slots[prompt.row]
            first = before[slot] + 1
            assert prompt.start == sum(plan.num_tokens[: prompt.row])
            assert prompt.following.tolist() == truth.tokens[slot][first : first + plan.num_tokens[prompt.row]]
        slots.advance(plan, layout)


@pytest.mark.parametrize("groups", [1, 3])
@given(st.data())
def test_in_the_hosts_memory(groups: int, data: st.DataObject) -> None:
    check(HostSlots(SLOTS, LENGTH, PAGE, VOCAB, num_groups=groups), data.draw(plans(groups)), groups)


@pytest.mark.parametrize("groups", [1, 3])
@given(st.data())
@settings(max_examples=15)
def test_on_a_device(groups: int, data: st.DataObject) -> None:
    pytest.importorskip("triton")
    from octavo.worker.resident.slots import DeviceSlots

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots = DeviceSlots(SLOTS, LENGTH, PAGE, VOCAB, device, groups=[CacheGroup()] * groups)
    check(slots, data.draw(plans(groups)), groups)


def rows_after(slots: Any, known: list[int], learned: list[list[SampledRow]]) -> list[list[int]]:
    """Return the tokens that each step with drafts computes, where another rank samples."""
    blocks = [list(range(-(-LENGTH // PAGE)))]
    params = SamplingParams(temperature=0)
    new = [NewRow(slot, known, len(known), params, 0, [], len(known) - 1, blocks) for slot in range(SLOTS)]
    found, drafts = [], [0] * SLOTS
    for number, rows in enumerate([[], *learned]):
        if rows:
            slots.learn(rows)
            drafts = [len(row.drafts) for row in rows]
        counts = [1 + count for count in drafts]
        plan = StepPlan(number, new if not rows else [], list(range(SLOTS)), counts, drafts, [True] * SLOTS, [], [])
        slots.apply(plan)
        layout = slots.lay_out(plan)
        found.append([*layout.input.input_ids.tolist(), *layout.input.positions.tolist()])
        slots.advance(plan, layout)
    return found


@given(st.data())
@settings(max_examples=15)
def test_what_another_rank_sampled_is_the_next_rows(data: st.DataObject) -> None:
    """Wherever the slots are: with drafts that were kept or rejected, and others after them."""
    known, token = [3, 1, 4], st.integers(0, VOCAB - 1)
    learned: list[list[SampledRow]] = []
    truth, expected, computed = [list(known) for _ in range(SLOTS)], [], [len(known) - 1] * SLOTS
    drafts: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(4):
        ids = [(truth[slot] + drafts[slot])[computed[slot] :] for slot in range(SLOTS)]
        places = [range(computed[slot], computed[slot] + len(one)) for slot, one in enumerate(ids)]
        expected.append([value for part in (ids, places) for one in part for value in one])
        rows = []
        for slot in range(SLOTS):
            kept = data.draw(st.integers(0, len(drafts[slot])))
            tokens = [*drafts[slot][:kept], data.draw(token)]
            follow = data.draw(st.lists(token, max_size=3))
            rows.append(SampledRow(slot, tokens, len(drafts[slot]), follow))
            computed[slot] += 1 + kept
            truth[slot] += tokens
            drafts[slot] = follow
        learned.append(rows)
    assert rows_after(HostSlots(SLOTS, LENGTH, PAGE, VOCAB), known, learned[:-1]) == expected
    if importlib.util.find_spec("triton"):
        from octavo.worker.resident.slots import DeviceSlots

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        assert rows_after(DeviceSlots(SLOTS, LENGTH, PAGE, VOCAB, device, drafts=True), known, learned[:-1]) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5), st.sampled_from(["f", "b"]))
def test_blocks_are_copied_one_after_the_other(copies: list[tuple[int, int]], kind: str) -> None:
    """Also where one copy reads what another writes."""
    layers = [PagedAttention(AttentionSpec(1, 1, 2, 1.0), ReferenceAttention()) for _ in range(2)]
    dtype = torch.float32 if kind == "f" else torch.float8_e4m3fn
    blocks = Blocks(layers, [CacheGroup(layers=(0, 1))], (6, 3), 3, dtype, CpuDevice())
    expected = []
    for i, layer in enumerate(layers):
        layer.cache.copy_(torch.arange(18).view(6, 3) % 13 + i)
        whole = layer.cache.float().clone()
        for source, destination in copies:
            whole[destination] = whole[source]
        expected.append(whole.tolist())
    blocks.copy(copies)
    assert [layer.cache.float().tolist() for layer in layers] == expected
    blocks.close()
    assert all(layer.cache.numel() == 0 for layer in layers)
