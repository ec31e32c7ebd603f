"""Draft tokens in a worker: a drafter's input and output, and the rows of logits of a batch with drafts.

Drafts are stored in a slot's row of tokens after the known ones, so that layout, penalties and bans read them like
other tokens; a count per slot gives their number. If they branch (`branches.py`), only the first ones, a chain, can be
read so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.draft_tree import DraftTree
from octavo.core.plan import StepPlan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafting:
    """The D rows of a step that get drafts. The tensors are on the device and must not be changed.

    Attributes:
        plan: the step; its tokens were drawn.
        rows: indices of the D rows in the plan.
        slots: [D] int64, their slots.
        limits: [D] int64, the most drafts of each row, at least 1.
        tokens: [slots, max_model_len] int32, the tokens of each slot, including those of this step; -1 in place of an
            embedding.
        length: [slots] integers, number of known tokens.
    """

    plan: StepPlan
    rows: Sequence[int]
    slots: Tensor
    limits: Tensor
    tokens: Tensor
    length: Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposed tokens for D rows.

    Attributes:
        tokens: [D, K] integers, K >= 1. Those beyond a row's limit are ignored.
        counts: [D] integers in [0, K], number of valid tokens of each row.
    """

    tokens: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class StoredDrafts:
    """The drafts that were stored for the next step.

    Attributes:
        counts: row of the plan -> number of drafts.
        tokens: row of the plan -> the drafts; empty unless the plan `reports_drafts`.
    """

    counts: dict[int, int]
    tokens: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Following:
    """Where D slots of a companion model continue: what another model's slots know. Tensors are on the device.

    Attributes:
        slots: the slots, on the host.
        index: [D] int64, the slots.
        length: [D] int64, number of known tokens.
        tokens: [D, W] integers, the last W known tokens; if there are fewer, the first one is repeated in front.
        counts: [D] int64, how many of the known tokens are not computed; None leaves what is computed as it is.
        most_length, least_length: [D] int64 on the host, bounds of `length`.
        most_counts: [D] int64 on the host, equal to `counts`, if there are any.
    """

    slots: Sequence[int]
    index: Tensor
    length: Tensor
    tokens: Tensor
    counts: Tensor | None
    most_length: Ints
    least_length: Ints
    most_counts: Ints

    def write(self, tokens: Tensor, length: Tensor, computed: Tensor) -> None:
        """Write it to tables of slots: tokens [slots, max_model_len], length [slots], computed [slots]."""
        width = self.tokens.shape[1]
        order = torch.arange(width, device=self.index.device)
        places = (self.length[:, None] - width + order).clamp_(min=0)
        tokens[self.index[:, None], places] = self.tokens.to(tokens.dtype)
        length[self.index] = self.length.to(length.dtype)
        if self.counts is not None:
            computed[self.index] = (self.length - self.counts).to(computed.dtype)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The R rows of a plan that sample, and the S tokens of its batch that get logits.

    Attributes:
        slots: [R] int64, the rows' slots.
        drafts: [R] int64, number of drafts in each row.
        starts: [R] int64, index of each row's first token among the S.
        tokens: [S] int64, indices into the batch.
        ahead: [S] int64, number of the row's drafts that lead to each token, itself included.
    """

    slots: Ints
    drafts: Ints
    starts: Ints
    tokens: Ints
    ahead: Ints

    @classmethod
    def of(cls, plan: StepPlan, tree: DraftTree | None = None) -> DraftRows:
        """`tree`: the shape of drafts that branch."""
        rows = np.flatnonzero(plan.samples)
        drafts = np.array(plan.num_drafts)[rows]
        sizes = 1 + drafts
        starts = sizes.cumsum() - sizes
        ahead = np.arange(sizes.sum()) - np.repeat(starts, sizes)
        ends = np.array(plan.num_tokens).cumsum()[rows]
        tokens = np.repeat(ends - sizes, sizes) + ahead
        if tree is not None:
            ahead = np.concatenate([[0], tree.depths])[ahead]
        return cls(np.array(plan.slots)[rows], drafts, starts, tokens, ahead)
