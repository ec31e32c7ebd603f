"""What a row's queries don't see changes nothing, whatever is in memory there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.rowwise import attend_row

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, window=5)
SLOPES = (0.5, 0.25, 0.125, 0.0625)


@pytest.mark.parametrize(
    ("spec", "hidden"),
    [(SPEC, 12), (replace(SPEC, chunked=True), 15), (replace(SPEC, slopes=SLOPES), 12), (replace(SPEC, window=40), 0)],
    ids=["window", "chunk", "window and slopes", "window over all"],
)
def test_cells_before_a_window_may_hold_nan(spec: AttentionSpec, hidden: int) -> None:
    """Three queries, of which the first is at position 16."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 8, generator=generator)
    k, v = torch.randn(2, 19, 2, 8, generator=generator)
    sinks = torch.randn(4, generator=generator)
    expected = attend_row(q, k, v, spec, sinks)
    for one in (k, v):
        one[:hidden] = float("nan")
    torch.testing.assert_close(attend_row(q, k, v, spec, sinks), expected)
    if hidden:
        k[hidden], v[hidden] = 0, 0
        assert not torch.allclose(attend_row(q, k, v, spec, sinks), expected), "the next cell is seen"
