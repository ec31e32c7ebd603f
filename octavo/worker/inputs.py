"""From a plan and the slots to the batch that the model sees, gathered on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.nn.step import StepInput
from octavo.worker.slots import Slots


def build_input(plan: StepPlan, slots: Slots, block_size: int) -> StepInput:
    """Lay the plan's rows out one after the other; each row's tokens follow what its slot has computed so far."""
    device = slots.tokens.device
    rows = torch.tensor(plan.slots, device=device)
    counts = torch.tensor(plan.num_tokens, device=device)
    computed = slots.computed[rows]
    seq_lens = computed + counts
    max_query_len, max_seq_len = max(plan.num_tokens), int(seq_lens.max())
    block_tables = slots.block_tables[rows, : -(-max_seq_len // block_size)]
    query_start = torch.zeros(len(plan.slots) + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, out=query_start[1:])
    if max_query_len == 1:
        row_of_token, positions = torch.arange(len(plan.slots), device=device), computed
    else:
        row_of_token, positions = _spread(counts, query_start, computed)
    blocks = block_tables[row_of_token, positions // block_size]
    return StepInput(
        input_ids=slots.tokens[rows[row_of_token], positions].long(),
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens.to(torch.int32),
        block_tables=block_tables,
        slot_mapping=blocks.long() * block_size + positions % block_size,
        logit_rows=(query_start[1:] - 1)[torch.tensor(plan.samples, device=device)].long(),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )


def _spread(counts: Tensor, query_start: Tensor, computed: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of the batch its row, and its position in that row's sequence."""
    row_of_token = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    offset = torch.arange(len(row_of_token), device=counts.device) - query_start[row_of_token]
    return row_of_token, computed[row_of_token] + offset
