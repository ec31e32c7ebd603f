"""`PoolingParams` says which parameter is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo import PoolingParams


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PoolingParams(dimension=2), "did you mean dimensions?"),  # type: ignore[call-arg]
        (lambda: PoolingParams(of=2), "has no parameter 'of'; it takes dimensions, use_activation."),  # type: ignore[call-arg]
    ],
)
def test_a_parameter_that_is_misspelled(make: Callable[[], object], says: str) -> None:
    with pytest.raises(TypeError) as error:
        make()
    assert says in str(error.value)
