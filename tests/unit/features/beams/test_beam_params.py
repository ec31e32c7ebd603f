"""`BeamSearchParams` says which parameter is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import BeamSearchParams


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: BeamSearchParams(beam_width=2, max_token=4), "did you mean max_tokens?"),  # type: ignore[call-arg]
        (lambda: BeamSearchParams(beam_width=2), "BeamSearchParams: Missing required argument 'max_tokens'"),  # type: ignore[call-arg]
    ],
)
def test_a_parameter_that_is_misspelled_or_missing(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError) as error:
        make()
    assert says in str(error.value)
