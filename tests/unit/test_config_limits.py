"""Limits of a step that nobody set follow those that somebody did."""

from __future__ import annotations

import pytest

from octavo.config import SchedulerConfig


@pytest.mark.parametrize(
    ("seqs", "tokens", "expected"),
    [
        (None, None, (1024, 8192)),
        (16, None, (16, 8192)),
        (None, 100, (100, 100)),
        (9000, None, (9000, 9000)),
        (50, 20, (50, 20)),  # refused later, with both named
    ],
)
def test_limits(seqs, tokens, expected):
    assert SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens).limits(1024, 8192) == expected
