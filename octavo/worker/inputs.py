"""From a plan and the slots to the batch that the model sees, in the host's memory.

In numpy, whose small operations take a fraction of torch's time: a step of one token must not wait for its bookkeeping.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.plan import StepPlan
from octavo.nn.step import StepInput
from octavo.worker.slots import Slots


def build_input(plan: StepPlan, slots: Slots, block_size: int) -> StepInput:
    """Lay the plan's rows out one after the other; each row's tokens follow what its slot has computed so far."""
    rows, counts = np.array(plan.slots), np.array(plan.num_tokens)
    computed = slots.computed.numpy()[rows]
    seq_lens = computed + counts
    query_start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    max_query_len, max_seq_len = max(plan.num_tokens), int(seq_lens.max())
    if max_query_len == 1:
        slot_of_token, positions = rows, computed
    else:
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        slot_of_token = rows[row_of_token]
        positions = computed[row_of_token] + np.arange(len(row_of_token)) - query_start[row_of_token]
    tables = slots.block_tables.numpy()
    places = tables[slot_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    last_tokens = query_start[1:].astype(np.int64) - 1
    return StepInput(
        input_ids=torch.from_numpy(slots.tokens.numpy()[slot_of_token, positions].astype(np.int64)),
        positions=torch.from_numpy(positions),
        query_start=torch.from_numpy(query_start),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        block_tables=torch.from_numpy(tables[rows, : -(-max_seq_len // block_size)]),
        slot_mapping=torch.from_numpy(places),
        logit_rows=torch.from_numpy(last_tokens[np.array(plan.samples)]),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
