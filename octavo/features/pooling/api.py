"""`PoolingParams`: options of vectors as an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.keywords import Suggesting
from octavo.python_api.inputs import one_each


class PoolingParams(msgspec.Struct, metaclass=Suggesting, kw_only=True):
    """
    Attributes:
        dimensions: number of elements to keep, for models trained for it.
        use_activation: whether to normalize vectors to length 1, or to turn the outputs of a classification head into
            probabilities; None for the model's default.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


GivenPoolingParams = PoolingParams | Sequence[PoolingParams] | None


def settings_of(
    given: GivenPoolingParams, count: int, *, dimensions: int | None = None, normalize: bool | None = None
) -> list[dict[str, Any]]:
    """Return dimensions and normalization for each of `count` prompts, from objects or plain arguments.

    Raises:
        InvalidRequestError: the numbers of objects and prompts differ, or both ways are used.
        TypeError: not a `PoolingParams`.
    """
    plain = {"dimensions": dimensions, "normalize": normalize}
    if given is None:
        return [plain] * count
    if any(value is not None for value in plain.values()):
        raise InvalidRequestError(
            "pooling_params can't be combined with dimensions or normalize; leave one of them out.",
            param="pooling_params",
        )
    found = one_each(given, count, "pooling_params")
    odd = next((one for one in found if not isinstance(one, PoolingParams)), None)
    if odd is not None:
        raise TypeError(f"pooling_params must be PoolingParams, or a list of them; got {type(odd).__name__}")
    return [{"dimensions": one.dimensions, "normalize": one.use_activation} for one in found]
