"""How many layers launch all kernels of a model, judged by everything that layers hold but the values of weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

_NAMES = {"path", "superseded", *vars(nn.Module())}
"""Attributes that may differ between layers of one kind: names of weights. A module's parts are compared one by one."""
_DEEPEST = 5
_ALIGNED = 256
"""Bytes; kernels depend on no larger alignment."""
_PLAIN = (bool, int, float, str, bytes, range, type(None), type, torch.dtype, torch.device, torch.Size, Enum)


def count_until_all_kinds(layers: Sequence[nn.Module]) -> int:
    """Return the number of layers, from the first on, among which each kind of layer follows each kind that it follows
    anywhere."""
    forms = _Forms()
    kinds = [forms.of_layer(layer) for layer in layers]
    missing = set(pairwise(kinds))
    for count, pair in enumerate(pairwise(kinds), 2):
        missing.discard(pair)
        if not missing:
            return count
    return len(kinds)


class _Forms:
    """Makes keys of what layers hold. What several layers hold is looked through once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Hashable] = {}

    def of_layer(self, layer: nn.Module) -> Hashable:
        """Return a key that layers share only if they are alike. It may differ between layers that are alike, too."""
        return tuple((name, self._of(part, 0)) for name, part in layer.named_modules())

    def _of(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            return value.shape, value.dtype, value.device, value.data_ptr() % _ALIGNED
        if depth == _DEEPEST:
            return id(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(self._of(one, depth + 1) for one in value)
        if not type(value).__module__.startswith("octavo.") or (depth and isinstance(value, nn.Module)):
            return id(value)
        key = id(value), depth
        if key not in self._known:
            self._known[key] = self._of_object(value, depth)
        return self._known[key]

    def _of_object(self, value: Any, depth: int) -> Hashable:
        held = dict(getattr(value, "__dict__", {}))
        if dataclasses.is_dataclass(value):
            held |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif not held:
            return id(value)
        parts = ((name, self._of(one, depth + 1)) for name, one in held.items() if name not in _NAMES)
        return type(value), tuple(parts)
