"""Drafts of two sources for the rows of a step: those of lookup, and a head's for the rows that it has none for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from octavo.worker.drafts import Drafting, Drafts


def part_of(drafting: Drafting, places: Sequence[int]) -> Drafting:
    """Return some of the drafting rows. On a CPU only: the host waits for nothing there."""
    index = torch.from_numpy(np.asarray(places, dtype=np.int64))
    rows = [drafting.rows[place] for place in places]
    return replace(drafting, rows=rows, slots=drafting.slots[index], limits=drafting.limits[index])


def spread(drafts: Drafts, places: Sequence[int], count: int) -> Drafts:
    """Return drafts of some rows as those of `count` rows, the others without any."""
    index = torch.from_numpy(np.asarray(places, dtype=np.int64))
    tokens = drafts.tokens.new_zeros(count, drafts.tokens.shape[1])
    counts = drafts.counts.new_zeros(count)
    return Drafts(tokens.index_copy_(0, index, drafts.tokens), counts.index_copy_(0, index, drafts.counts))


def either(first: Drafts, others: Drafts | None) -> Drafts:
    """Return the first drafts, and the others of rows that have none of these. Waits for no device."""
    if others is None:
        return first
    width = max(first.tokens.shape[1], others.tokens.shape[1])
    mine, theirs = (functional.pad(one.tokens.long(), (0, width - one.tokens.shape[1])) for one in (first, others))
    found = first.counts > 0
    return Drafts(torch.where(found[:, None], mine, theirs), torch.where(found, first.counts, others.counts))
