"""Drafts of two sources are put together row by row."""

from __future__ import annotations

from unittest.mock import Mock

import torch

from octavo.core.plan import StepPlan
from octavo.features.speculation.heads.lookup_first import either, part_of, spread
from octavo.worker.drafts import Drafting, Drafts


def drafts(tokens: list[list[int]], counts: list[int]) -> Drafts:
    return Drafts(torch.tensor(tokens), torch.tensor(counts))


def test_a_row_has_the_first_drafts_if_there_are_any() -> None:
    first = drafts([[1, 2, 3], [0, 0, 0], [4, 0, 0]], [3, 0, 1])
    assert either(first, None) is first
    found = either(first, drafts([[7, 8], [5, 6], [9, 9]], [2, 1, 2]))
    assert found.counts.tolist() == [3, 1, 1]
    assert [row[:count] for row, count in zip(found.tokens.tolist(), [3, 1, 1], strict=True)] == [[1, 2, 3], [5], [4]]
    wider = either(drafts([[1], [0]], [1, 0]), drafts([[7, 8, 9], [5, 6, 7]], [3, 3]))
    assert wider.counts.tolist() == [1, 3]
    assert wider.tokens[1].tolist() == [5, 6, 7]


def test_a_part_of_the_rows_is_drafted_for_and_put_back() -> None:
    plan = Mock(spec=StepPlan)
    slots, limits = torch.tensor([4, 6, 7]), torch.tensor([1, 2, 3])
    whole = Drafting(plan, [0, 2, 3], slots, limits, torch.zeros(8, 9, dtype=torch.int32), torch.zeros(8))
    part = part_of(whole, [0, 2])
    assert (part.rows, part.slots.tolist(), part.limits.tolist()) == ([0, 3], [4, 7], [1, 3])
    back = spread(drafts([[1, 2], [3, 4]], [2, 1]), [0, 2], 3)
    assert (back.counts.tolist(), back.tokens[2].tolist()) == ([2, 0, 1], [3, 4])
