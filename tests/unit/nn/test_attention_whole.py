"""Attention of whole sequences against the same written out plainly."""

from __future__ import annotations

import pytest
import torch

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.reference import attend_dense
from octavo.nn.attention.whole import WholeAttention, attend_whole, groups_of
from octavo.nn.step import StepInput


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


def test_a_layer_of_a_decoder_attends_to_whole_sequences() -> None:
    """Its window reaches as far ahead as back, several heads share a key, and nothing is kept. The plain reference gets
    one query at a time, behind the keys that it reaches."""
    torch.manual_seed(1)
    lengths, spec = [6, 11, 6], AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=4)
    q, k, v = torch.randn(23, 4, 8), torch.randn(23, 2, 8), torch.randn(23, 2, 8)
    nothing = torch.empty(0)
    step = StepInput(*[nothing] * 7, max_query_len=11, max_seq_len=11, query_lens=lengths)
    layer = PagedAttention(spec, WholeAttention())
    step.attn = layer.backend.prepare(step, 1)
    found = layer(q, k, v, step)
    begin = 0
    for length in lengths:
        for place in range(length):
            near = range(max(0, place - 3), min(length, place + 4))
            order = torch.tensor([begin + i for i in near])
            wide = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
            expected = attend_dense(q[begin + place][None], k[order], v[order], wide)
            torch.testing.assert_close(found[begin + place].double(), expected[0], atol=1e-5, rtol=1e-5)
        begin += length
    assert step.attn.keys is None
    assert layer.cache.numel() == 0
