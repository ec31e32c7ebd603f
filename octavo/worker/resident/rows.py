"""`ResidentSlots`: the truth about running requests on the device, and what of it the host needs in order to launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.core.params import LogprobsMode
from octavo.core.plan import NewRow, StepPlan
from octavo.device.transfer import upload, upload_parts
from octavo.nn.step import StepInput
from octavo.sampling.resident import NUM_PARAMS, ParamTable, Row, packed_params
from octavo.sampling.resident_logprobs import PromptRow
from octavo.sampling.state import PreparedParams
from octavo.worker.resident.sharing import BlockTables, Groups
from octavo.worker.resident.triton_rows import advance_kernel, append_kernel, extend_kernel, fill_kernel, layout_kernel

_FILL_BLOCK = 1024
_BLOCK = 256
_HEADER = 6 + NUM_PARAMS


@dataclass(slots=True)
class _Held:
    params: PreparedParams
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows on the device.

    Attributes:
        slots: [R] int32; the number of slots itself stands for a row of padding.
        query_start: [R + 1] int32.
        row_of_token: [T] int32.
    """

    slots: Tensor
    query_start: Tensor
    row_of_token: Tensor


class ResidentSlots:
    """Row s holds the request in slot s; nothing is ever read back.

    tokens [slots, max_model_len] int32, length and computed [slots] int32, block_tables [slots, blocks] int32, params
    [slots, NUM_PARAMS] int32. The host mirrors `computed` and the block tables, which follow from the plans alone.

    Attributes:
        tables: the host's copy of `block_tables`.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.num_slots = num_slots
        self.max_model_len = max_model_len
        self.device = device
        self.tokens = zeros(num_slots + 1, max_model_len)
        self.length = zeros(num_slots + 1)
        self.computed = zeros(num_slots + 1)
        self.block_tables = zeros(num_slots + 1, max_blocks)
        self.params = zeros(num_slots + 1, NUM_PARAMS)
        self.vocab_size = vocab_size
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self.tables = BlockTables(num_slots, max_blocks)
        self._computed = np.zeros(num_slots + 1, dtype=np.int64)
        self._held: list[_Held | None] = [None] * num_slots

    @property
    def table(self) -> ParamTable:
        return ParamTable(self.params, self.tokens, self.length)

    def apply(self, plan: StepPlan) -> None:
        """Take in what the plan changes: requests that took a slot, then changed block tables."""
        if plan.new:
            self._fill(plan.new)
        if plan.block_writes:
            self.tables.write(plan.block_writes)
            writes = upload(np.asarray(plan.block_writes, dtype=np.int32)[:, [0, 2, 3]].ravel(), self.device)
            count = len(plan.block_writes)
            extend_kernel[(triton.cdiv(count, _BLOCK),)](
                writes, self.block_tables, count, self.block_tables.stride(0), BLOCK=_BLOCK
            )

    def max_seq_len(self, plan: StepPlan) -> int:
        """The longest sequence of the step once it is computed."""
        return int((self._computed[plan.slots] + plan.num_tokens).max())

    def past_lens(self, plan: StepPlan) -> list[int]:
        """Of each of the step's rows, the tokens computed before it."""
        past: list[int] = self._computed[plan.slots].tolist()
        return past

    def shared(self, slots: Sequence[int], page: int, most: int, tokens: int) -> Groups | None:
        """Which of these requests' contexts begin alike, in groups of at most so many, by multiples of so many tokens;
        None if none do."""
        whole_blocks = self._computed[slots] // page
        return self.tables.groups(slots, whole_blocks, most, math.lcm(tokens, page) // page)

    def sample_rows(self, plan: StepPlan) -> list[Row]:
        """The rows that sample, as the host knows them; called before `note`."""
        rows = []
        for slot, past, count, samples in zip(
            plan.slots, self.past_lens(plan), plan.num_tokens, plan.samples, strict=True
        ):
            if samples:
                held = self._held[slot]
                if held is None:
                    raise AssertionError(f"slot {slot} is sampled but empty")
                rows.append(Row(slot, held.params, held.num_prompt, past + count))
        return rows

    def reports(self, plan: StepPlan) -> bool:
        """Whether some of the plan's requests are to be told of their prompt's probabilities."""
        held = (self._held[slot] for slot in plan.slots)
        return any(one is not None and one.params.prompt_logprobs is not None for one in held)

    def prompt_rows(self, plan: StepPlan, hidden: Tensor) -> list[PromptRow]:
        """Rows whose prompt is to be reported on; called before `note`. `hidden` [T, H] are the batch's states."""
        found = []
        start = 0
        for row, (slot, count) in enumerate(zip(plan.slots, plan.num_tokens, strict=True)):
            held = self._held[slot]
            asked = None if held is None else held.params.prompt_logprobs
            if held is not None and asked is not None:
                first = int(self._computed[slot])
                known = min(count, held.num_prompt - 1 - first)
                if known > 0:
                    following = self.tokens[slot, first + 1 : first + 1 + known]
                    found.append(PromptRow(row, asked, hidden[start : start + known], following))
            start += count
        return found

    def note(self, plan: StepPlan) -> None:
        """The plan was launched: mirror what it computes."""
        self._computed[plan.slots] += plan.num_tokens

    def lay_out(self, batch: Batch, into: StepInput, page: int) -> None:
        """Write the tokens, positions, cells and lengths of a batch into `into`'s tensors."""
        rows, tokens = into.num_rows, into.num_tokens
        layout_kernel[(triton.cdiv(max(rows, tokens), _BLOCK),)](
            batch.slots,
            batch.query_start,
            batch.row_of_token,
            self.tokens,
            self.computed,
            self.block_tables,
            into.input_ids,
            into.positions,
            into.slot_mapping,
            into.seq_lens,
            rows,
            tokens,
            self.num_slots,
            self.tokens.stride(0),
            self.block_tables.stride(0),
            PAGE=page,
            BLOCK=_BLOCK,
        )

    def advance(self, batch: Batch) -> None:
        """The batch's tokens are computed."""
        rows = batch.slots.shape[0]
        advance_kernel[(triton.cdiv(rows, _BLOCK),)](
            batch.slots, batch.query_start, self.computed, rows, self.num_slots, BLOCK=_BLOCK
        )

    def append(self, slots: Tensor, sampled: Tensor) -> None:
        """One sampled token [S] for each of these slots [S]."""
        count = slots.shape[0]
        append_kernel[(triton.cdiv(count, _BLOCK),)](
            slots, sampled, self.tokens, self.length, count, self.num_slots, self.tokens.stride(0), BLOCK=_BLOCK
        )

    def _fill(self, new: list[NewRow]) -> None:
        headers = np.zeros((len(new), _HEADER), dtype=np.int32)
        pieces: list[np.ndarray] = [headers.reshape(-1)]
        offset = headers.size
        longest = 1
        for header, row in zip(headers, new, strict=True):
            params = PreparedParams.of(row, self.vocab_size, self._logprobs_mode)
            self._held[row.slot] = _Held(params, row.num_prompt)
            self._computed[row.slot] = row.num_computed
            self.tables.fill(row)
            count, blocks = len(row.tokens), len(row.blocks[0])
            header[:6] = row.slot, count, row.num_computed, offset, offset + count, blocks
            header[6:] = packed_params(params, row.num_prompt)
            pieces += [np.asarray(row.tokens, dtype=np.int32), np.asarray(row.blocks[0], dtype=np.int32)]
            offset += count + blocks
            longest = max(longest, count, blocks)
        packed = upload(np.concatenate(pieces), self.device)
        fill_kernel[(len(new), triton.cdiv(longest, _FILL_BLOCK))](
            packed,
            packed,
            self.tokens,
            self.length,
            self.computed,
            self.block_tables,
            self.params,
            self.tokens.stride(0),
            self.block_tables.stride(0),
            HEADER=_HEADER,
            PARAMS=NUM_PARAMS,
            BLOCK=_FILL_BLOCK,
        )


def make_batch(plan: StepPlan, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
    """The plan's layout on the device, in one transfer.

    Returns:
        the batch; which of its tokens get logits, [S] int32; and their slots, [S] int32.
    """
    counts = np.asarray(plan.num_tokens, dtype=np.int32)
    slots = np.asarray(plan.slots, dtype=np.int32)
    start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=start[1:])
    samples = np.asarray(plan.samples, dtype=bool)
    row_of_token = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    parts = [slots, start, row_of_token, start[1:][samples] - 1, slots[samples]]
    sent = upload_parts(parts, device)
    return Batch(*sent[:3]), sent[3], sent[4]


def empty_step(rows: int, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """The tensors that `lay_out` fills."""
    return {
        "input_ids": torch.empty(tokens, dtype=torch.int64, device=device),
        "positions": torch.empty(tokens, dtype=torch.int64, device=device),
        "slot_mapping": torch.empty(tokens, dtype=torch.int64, device=device),
        "seq_lens": torch.empty(rows, dtype=torch.int32, device=device),
    }
