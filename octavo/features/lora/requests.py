"""Messages from front ends to the engine half: the option of a request, and the methods of `EngineHook.call`.

| method | arguments | result |
| --- | --- | --- |
| `list` | | `{"adapters": [Adapter]}`, in the order in which they were loaded |
| `find` | `name` | `{"adapter": Adapter}`, or `{"adapter": None}`; looks into `--lora-dir`, too |
| `load` | `name`, `path`, `in_place`, `again` | `{"adapter": Adapter}`, once requests can name it |
| `unload` | `name` | `{}`, once its last request has ended and its memory is free |
| `pin` | `name`, `pinned` | `{}`, once it is in the device's memory (if `pinned`) |

With `again`, a name that is there already is no error if its path is the same. Errors are `InvalidRequestError`; for a
file that can't be used, `ModelFileError`; for a name or path that is not there, `ModelNotFoundError`. A request whose
adapter is gone is refused with `gone(name)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, ModelNotFoundError

MOST_PARTS = 8
"""Most adapters of one request: their ranks add up."""
CHANGES = "lora_changes"
"""The counter among the feature's metrics that grows when a name comes, goes or means another adapter."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One adapter of a request; `weight` multiplies its addition."""

    name: str
    weight: float = 1.0


Selection = tuple[Part, ...]
"""The option of a request: the adapters whose additions are summed, each name once."""


class LoraInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The feature's entry in `ModelInfo.feature_info`.

    Attributes:
        adapters: number of adapters known at the start.
        updates: whether clients of a server may load and unload adapters.
        added_tokens: most tokens that an adapter may add to the vocabulary.
    """

    max_rank: int
    max_adapters: int
    adapters: int = 0
    updates: bool = False
    added_tokens: int = 0


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests can name.

    Attributes:
        path: its folder or file, on the engine's machine.
        parent: name of its base model, if one was given with it; "" for the served model.
        rank: the largest rank of a projection.
        state: where its weights are: "disk", "host" or "device".
        pinned: they stay in the device's memory.
    """

    name: str
    path: str
    parent: str = ""
    rank: int = 0
    state: str = "disk"
    pinned: bool = False


def already_loaded(name: str) -> InvalidRequestError:
    """Return the error for loading a name that is there."""
    text = (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
        "'load_inplace' to True."
    )
    return InvalidRequestError(text, param="lora_name", value=name)


def not_loaded(name: str) -> ModelNotFoundError:
    """Return the error for unloading or pinning a name that is not there."""
    return ModelNotFoundError(f"The lora adapter '{name}' cannot be found.")


def gone(name: str) -> InvalidRequestError:
    """Return the error for a request that names an adapter that is not there."""
    return InvalidRequestError(f"The model `{name}` does not exist.", param="model", value=name)


def encode(selection: Selection) -> msgspec.Raw:
    """Return a request's option."""
    return msgspec.Raw(msgspec.msgpack.encode(selection))


def decode(option: msgspec.Raw) -> Selection:
    """Return the adapters of a request's option."""
    return msgspec.msgpack.decode(option, type=Selection)


def selection_of(given: Any, param: str) -> Selection:
    """Return the adapters of a request's field: a name, an object with `name` and `weight`, or a list of these.

    Raises:
        InvalidRequestError: it has another form, a name twice, or a weight that is not a finite number.
    """
    several: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if not several or len(several) > MOST_PARTS:
        raise InvalidRequestError(f"{param} must have 1 to {MOST_PARTS} adapters, got {len(several)}.", param=param)
    parts = tuple(_part(one, f"{param}.{number}") for number, one in enumerate(several))
    names = [part.name for part in parts]
    odd = next((name for name in names if names.count(name) > 1), None)
    if odd is not None:
        raise InvalidRequestError(f"{param} names an adapter twice; add up its weights.", param=param, value=odd)
    return parts


def _part(given: Any, param: str) -> Part:
    fields = {"name": given} if isinstance(given, str) else given
    if not isinstance(fields, dict):
        text = f'{param} must be an adapter\'s name or {{"name": ..., "weight": ...}}.'
        raise InvalidRequestError(text, param=param, value=given)
    name = fields.get("name", fields.get("lora_name"))
    weight = fields.get("weight", 1.0)
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{param}.name must be an adapter's name.", param=f"{param}.name", value=name)
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight):
        raise InvalidRequestError(f"{param}.weight must be a finite number.", param=f"{param}.weight", value=weight)
    return Part(name, float(weight))
