"""From a plan and the slots to the batch that the model sees, in the host's memory.

In numpy, whose small operations take a fraction of torch's time: a step of one token must not wait for its bookkeeping.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.plan import StepPlan
from octavo.nn.step import StepInput
from octavo.worker.slots import Ints, Slots


def build_input(plan: StepPlan, rows: Ints, counts: Ints, slots: Slots, block_size: int) -> StepInput:
    """Lay the plan's rows out one after the other; each row's tokens follow what its slot has computed so far.

    Args:
        rows, counts: [R] int64, the plan's slots and numbers of tokens.
    """
    computed = slots.computed[rows]
    seq_lens = (computed + counts).astype(np.int32)
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    counts.cumsum(out=query_start[1:])
    max_query_len, max_seq_len = int(counts.max()), int(seq_lens.max())
    if max_query_len == 1:
        slot_of_token, positions = rows, computed
    else:
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        slot_of_token = rows[row_of_token]
        positions = computed[row_of_token] + np.arange(len(row_of_token)) - query_start[row_of_token]
    places = slots.block_tables[slot_of_token, positions // block_size] * np.int64(block_size) + positions % block_size
    logit_rows = query_start[1:].astype(np.int64) - 1
    if not all(plan.samples):
        logit_rows = logit_rows[np.array(plan.samples)]
    return StepInput(
        input_ids=torch.from_numpy(slots.tokens[slot_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(seq_lens),
        block_tables=torch.from_numpy(slots.block_tables[rows, : -(-max_seq_len // block_size)]),
        slot_mapping=torch.from_numpy(places),
        logit_rows=torch.from_numpy(logit_rows),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
