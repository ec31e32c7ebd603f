"""What the host must know of a row in order to choose how it is sampled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from octavo.core.params import SamplingParams
from octavo.sampling.resident import ResidentRow
from octavo.sampling.state import PreparedParams


def row(num_tokens: int, **settings: object) -> ResidentRow:
    params = PreparedParams.make(SamplingParams(max_tokens=50, **settings), 0, [7], 100)  # type: ignore[arg-type]
    return ResidentRow(0, params, 10, num_tokens)


def test_a_minimum_of_tokens_stops_mattering_once_it_is_reached():
    assert not row(12, min_tokens=3).plain
    assert row(13, min_tokens=3).plain


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 0},
        {"allowed_token_ids": [1]},
        {"bad_token_ids": [[1]]},
        {"top_k": 5},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_what_changes_or_reports_on_logits_is_not_plain(settings):
    assert not row(12, **settings).plain


def test_what_only_draws_is_plain():
    assert row(12, temperature=0).plain
    assert row(12, temperature=0.7).plain
    assert row(12, temperature=0, top_k=5).plain
