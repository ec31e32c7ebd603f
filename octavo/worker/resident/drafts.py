"""`DeviceDrafts`: drafts of slots on a device. The host never waits for the number of accepted ones.

Until a step's tokens have arrived, the host's counts are upper bounds, as if all drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import SampledRow, StepPlan
from octavo.device.transfer import download, upload, upload_parts
from octavo.sampling.verify import verify
from octavo.worker.branches import Branches, in_batch, kept_first
from octavo.worker.drafts import Drafting, DraftRows, Drafts, Ints, StoredDrafts

if TYPE_CHECKING:
    from octavo.worker.resident.slots import DeviceSlots


class Accepted(NamedTuple):
    """What the rows of a step keep of the tokens drawn.

    Attributes:
        tokens: [S] int32, of each row those that are kept first.
        kept: [R] int64, their number for each sampling row.
        settle: to be called with these numbers once they have arrived on the host.
        order: see `Drawn`.
    """

    tokens: Tensor
    kept: Tensor
    settle: Callable[[list[int]], None]
    order: Tensor | None


class DeviceDrafts:
    """The part of `DeviceSlots` that exists only if a feature drafts.

    Attributes:
        unsure: [slots + 1] int64, on the host: drafts in launched steps whose tokens have not arrived. Upper bound on
            the rejected positions among a slot's computed ones.
    """

    def __init__(self, slots: DeviceSlots, branches: Branches | None = None) -> None:
        """`branches`: verifies drafts that branch; None if none do."""
        self.unsure = np.zeros(slots.num_slots + 1, dtype=np.int64)
        self._slots = slots
        self._branches = branches
        self._counts = torch.zeros_like(slots.length)

    def drafting(self, plan: StepPlan) -> Drafting:
        slots = self._slots
        rows = list(plan.proposals)
        parts = [np.array(part, dtype=np.int32) for part in ([plan.slots[i] for i in rows], [*plan.proposals.values()])]
        numbers, limits = (part.long() for part in upload_parts(parts, slots.device))
        return Drafting(plan, rows, numbers, limits, slots.tokens, slots.length)

    def draft(self, drafting: Drafting, drafts: Drafts | None) -> Callable[[], StoredDrafts]:
        slots, limits = drafting.slots, drafting.limits
        most = max(drafting.plan.proposals.values())
        order = torch.arange(most, device=slots.device)
        tokens, counts = limits.new_zeros(len(slots), most), torch.zeros_like(limits)  # padding must be a token, too
        if drafts is not None:
            counts = torch.minimum(drafts.counts.long(), limits)
            proposed = drafts.tokens[:, :most].clamp(0, self._slots.vocab_size - 1)
            tokens[:, : proposed.shape[1]] = proposed
            tokens.masked_fill_(order >= counts[:, None], 0)
        self._write(slots, self._slots.length[slots], tokens, limits)
        self._counts[slots] = counts.int()
        if drafting.plan.reports_drafts:
            whole = download(torch.cat([counts[:, None], tokens.long()], 1))
            return lambda: _stored(drafting.rows, whole.wait().tolist())
        sent = download(counts)
        return lambda: StoredDrafts(dict(zip(drafting.rows, sent.wait().tolist(), strict=True)))

    def accept(self, plan: StepPlan, drawn: Tensor) -> Accepted:
        """Verify a step's drafts and append the tokens that are kept.

        Args:
            drawn: [S] int32, the tokens drawn after no draft and after each one; -1 where none could be drawn.

        """
        table, branches = self._slots, self._branches
        rows = DraftRows.of(plan)
        sent = [part.astype(np.int32) for part in (rows.slots, rows.drafts, rows.starts)]
        slots, room, starts = (part.long() for part in upload_parts(sent, table.device))
        width = int(rows.drafts.max()) + 1
        order = torch.arange(width, device=table.device)
        length = table.length[slots].long()
        places = (length[:, None] + order[:-1]).clamp_(max=table.max_model_len - 1)
        drafts = table.tokens[slots[:, None], places]
        parts = [drawn, drafts, torch.minimum(self._counts[slots].long(), room), starts]
        order_in_batch: Tensor | None = None
        if branches is not None and branches.tree.branches(plan):
            kept, paths = branches.verify(*parts)
            branches.settle(kept, paths, length, table.tables_of(slots))
            first = kept_first(len(drawn), starts, kept, paths)
            drawn, tokens = drawn[first], upload(rows.tokens, table.device)
            order_in_batch = in_batch(first, tokens, plan.total_tokens)
        else:
            kept = verify(*parts)
        appended = drawn[(starts[:, None] + order).clamp_(max=len(drawn) - 1)].clamp(min=0)
        self._write(slots, length, appended, kept)
        table.length[slots] = (length + kept).int()
        table.computed[slots] += (kept - 1 - room).int()
        return Accepted(drawn, kept, lambda counts: self._settle(rows, np.array(counts)), order_in_batch)

    def learn(self, sampled: Sequence[SampledRow]) -> None:
        """Take in tokens that another rank kept, and the drafts after them."""
        table = self._slots
        known = [[*one.tokens, *one.drafts] for one in sampled]
        counts = [len(one) for one in known]
        padded = np.zeros((len(known), max(counts)), dtype=np.int32)
        for row, one in zip(padded, known, strict=True):
            row[: len(one)] = one
        numbers = [(one.slot, len(one.tokens), one.num_rejected) for one in sampled]
        parts = [*np.array(numbers, dtype=np.int32).T, np.array(counts, dtype=np.int32), padded.reshape(-1)]
        slots, kept, rejected, count, tokens = (part.long() for part in upload_parts(parts, table.device))
        length = table.length[slots]
        self._write(slots, length, tokens.view(padded.shape), count)
        table.length[slots] = (length + kept).int()
        table.computed[slots] -= rejected.int()
        own = np.array([one.slot for one in sampled])
        self.unsure[own] -= [one.num_drafts for one in sampled]
        table.take_back(own, np.array([one.num_rejected for one in sampled]))

    def _settle(self, rows: DraftRows, kept: Ints) -> None:
        self.unsure[rows.slots] -= rows.drafts
        self._slots.take_back(rows.slots, 1 + rows.drafts - kept)

    def _write(self, slots: Tensor, length: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write the first `counts` [R] of `tokens` [R, n] after each slot's known tokens; the rest goes to padding."""
        table = self._slots
        order = torch.arange(tokens.shape[1], device=tokens.device)
        meant = order < counts[:, None]
        row = torch.where(meant, slots[:, None], table.num_slots)
        table.tokens[row, torch.where(meant, length[:, None] + order, 0)] = tokens.int()


def _stored(rows: Sequence[int], found: list[list[int]]) -> StoredDrafts:
    """Return the drafts of these rows of the plan: a count for each, and its tokens with padding."""
    counts = {row: count for row, (count, *_) in zip(rows, found, strict=True)}
    return StoredDrafts(counts, {row: one[1 : 1 + one[0]] for row, one in zip(rows, found, strict=True)})
