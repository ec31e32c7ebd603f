"""Attention of whole sequences against the same written out plainly."""

from __future__ import annotations

import pytest
import torch

from octavo.nn.attention.whole import attend_whole, groups_of


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 9, 3, 1, 9, 4]])
@pytest.mark.parametrize("reach", [None, 0, 2, 50])
def test_each_token_sees_its_own_sequence_as_far_as_it_may(lengths: list[int], reach: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), 2, 8).unbind(0)
    found = attend_whole(q, k, v, groups_of(lengths, torch.device("cpu")), reach)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    visible = sequence[:, None] == sequence
    if reach is not None:
        visible &= (place[:, None] - place).abs() <= reach
    for head in range(2):
        scores = (q[:, head].double() @ k[:, head].double().T) * 8**-0.5
        expected = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v[:, head].double()
        torch.testing.assert_close(found[:, head].double(), expected, atol=1e-5, rtol=1e-5)
