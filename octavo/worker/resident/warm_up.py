"""Run the largest and most varied steps once, so that later ones compile nothing and allocate no memory."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from octavo.core.params import SamplingParams
from octavo.core.plan import NewRow, StepPlan
from octavo.worker.own_rows import OwnRows
from octavo.worker.resident.batches import token_counts
from octavo.worker.resident.row_counts import own_sizes
from octavo.worker.resident.slots import DeviceSlots
from octavo.worker.runner import Runner

log = logging.getLogger(__name__)


def most_rows(own: OwnRows | None, num_slots: int, max_tokens: int) -> int:
    """Return the most rows of a step, padding included: a recorded step of T tokens has T + 2.

    Args:
        own: runs the layers on a rank's own rows; None if ranks divide each layer.
    """
    whole = [] if own is None else own_sizes(own.mesh.size, num_slots)
    return max([num_slots, *(count + 2 for count in token_counts(max_tokens)), *whole])


def warm_up(runner: Runner, slots: DeviceSlots, max_tokens: int, max_drafts: int = 0) -> None:
    """Run the steps. Slots and KV cache must be empty.

    Args:
        max_tokens: limit of a step, or of each rank's part of it.
        max_drafts: most drafts of a row.
    """
    began = time.perf_counter()
    all_slots = slots.num_slots
    long = min(slots.max_model_len - 1, max_tokens)
    long_rows = min(max(1, max_tokens // long), all_slots)
    # The longest step has the largest activations, the one of all rows the largest logits: so this needs no more tokens
    # than a step that is not recorded.
    unrecorded = min(max_tokens, max(token_counts(max_tokens), default=0) + 1)
    rest = min(slots.max_model_len - 1, max(9, unrecorded - all_slots + 1))
    for counts in ([1, 1, 9], [2, 2], [long] * long_rows, [1] * (all_slots - 1) + [rest]):
        *others, last = counts[-all_slots:]
        counts = [*others, max(1, min(last, max_tokens - sum(others)))]  # buffers of features hold no more
        step = runner.forward(_trial(counts, len(slots.block_tables)))
        runner.sample(step, {})
        step.result()
    drafts = min(max_drafts, max_tokens // 2 - 1, slots.max_model_len - 4)
    if slots.tree is not None and drafts < len(slots.tree):
        drafts = min(drafts, slots.tree.chain)  # a tree is whole
    if drafts > 0:
        _draft(runner, min(2, all_slots), len(slots.block_tables), drafts)
    log.info("ran the largest steps in %.1f s", time.perf_counter() - began)


def _draft(runner: Runner, rows: int, groups: int, drafts: int) -> None:
    """Propose drafts after a prompt, verify them, and draw a token where the host does not know the length."""
    start = _trial([2] * rows, groups)
    proposing = msgspec.structs.replace(start, proposals=dict.fromkeys(range(rows), drafts))
    counts = [drafts] * rows
    verifying = msgspec.structs.replace(start, new=[], num_tokens=[1 + drafts] * rows, num_drafts=counts)
    following = msgspec.structs.replace(start, new=[], num_tokens=[1] * rows)
    steps = []
    for plan in (proposing, verifying, following):
        steps.append(runner.forward(plan))
        runner.sample(steps[-1], {})
    for step in steps:
        step.result()


def _trial(counts: list[int], groups: int) -> StepPlan:
    """Build a step with `counts` tokens per row, all in block 0, that uses all sampling methods."""
    bans = {"bad_token_ids": [[2], [0, 3]], "allowed_token_ids": [0, 1, 2]}
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1, "repetition_penalty": 1.1, "logit_bias": {0: 1.0}},
        {"temperature": 1, "top_k": 2, "top_p": 0.9, "min_p": 0.1, "frequency_penalty": 0.1, **bans},
    ]
    new = [
        NewRow(
            slot=slot,
            tokens=[0] * count,
            num_prompt=count,
            params=SamplingParams(min_tokens=1, **ways[slot % len(ways)]),
            seed=0,
            stop_ids=[1],
            num_computed=0,
            blocks=[[]] * groups,
        )
        for slot, count in enumerate(counts)
    ]
    return StepPlan(
        id=-1,
        new=new,
        slots=list(range(len(counts))),
        num_tokens=counts,
        num_drafts=[0] * len(counts),
        samples=[True] * len(counts),
        block_writes=[],
        copies=[],
    )
