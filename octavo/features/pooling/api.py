"""`PoolingParams`: how a script wants its vectors, where it says so in an object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.keywords import Suggesting
from octavo.python.inputs import one_each


class PoolingParams(msgspec.Struct, metaclass=Suggesting, kw_only=True):
    """
    Attributes:
        dimensions: keep so many elements, for models that were trained for it.
        use_activation: whether vectors get length 1, or the outputs of a classification head become probabilities; None
            for the model's own way.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


PoolingSettings = PoolingParams | Sequence[PoolingParams] | None


def settings_of(
    given: PoolingSettings, count: int, *, dimensions: int | None = None, normalize: bool | None = None
) -> list[dict[str, Any]]:
    """Dimensions and normalization for each of `count` prompts, from the object or from plain arguments.

    Raises:
        InvalidRequestError: there are not as many objects as prompts, or both ways are used.
        TypeError: something else than `PoolingParams`.
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
