"""`SamplingParams` says which field is wrong, of whichever type it is."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams
from octavo.core.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", "x"),
        ("n", "2"),
        ("temperature", None),
        ("max_tokens", [1]),
        ("stop", 5),
        ("logit_bias", [1]),
        ("bad_words", 5),
        ("allowed_token_ids", 7),
    ],
)
def test_a_value_of_a_wrong_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
