"""Checkpoints of architectures whose tensors transformers renames, splits or joins while it loads them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from octavo.core.errors import ModelFileError
from octavo.models.load.checkpoint import Checkpoint
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec


def converted(source: Checkpoint, model: PreTrainedModel) -> Checkpoint:
    """Return a checkpoint with the names and shapes of transformers' module, by the library's own rules."""
    return ConvertedCheckpoint(source, model) if source.names() else source


@dataclass(slots=True)
class _Conversion:
    """How tensors of the model are made from stored ones.

    Attributes:
        target: the first tensor that it makes.
        stored: pattern of the converter -> names of the stored tensors, in the order of their numbers.
    """

    converter: Any
    target: str
    stored: dict[str, list[str]] = field(default_factory=dict)


class ConvertedCheckpoint:
    """A view of `source` by the conversion rules of a model's class."""

    def __init__(self, source: Checkpoint, model: PreTrainedModel) -> None:
        self.origin = source.origin
        self._source = source
        self._model = model
        self._renamed: dict[str, str] = {}
        self._made: dict[str, _Conversion] = {}
        self._plan()

    def _plan(self) -> None:
        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        prefix, known = self._model.base_model_prefix, self._model.state_dict()
        for stored in sorted(self._source.names(), key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, known)
            if name not in known and stored in known:
                name, pattern = rename_source_key(stored, [], [], prefix, known)
            if pattern is None or name not in known:
                self._renamed[name if name in known else stored] = stored
                continue
            converter = by_pattern[pattern]
            conversion = self._made.get(name) or _Conversion(converter, name)
            conversion.stored.setdefault(pattern, []).append(stored)
            first = converter.target_patterns[0]
            for other in converter.target_patterns:
                self._made[name.replace(first, other, 1)] = conversion
        ignored = _matches(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None))
        self._renamed = {name: stored for name, stored in self._renamed.items() if name in known or not ignored(name)}

    def names(self) -> Set[str]:
        return self._renamed.keys() | self._made.keys()

    def has(self, name: str) -> bool:
        return name in self._renamed or name in self._made

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(self._renamed[name]) if name in self._renamed else None

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        if name not in self._renamed:
            return None
        return self._source.blocks(self._renamed[name], entry, codes=codes, index=index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        if name in self._renamed:
            return self._source.tensor(self._renamed[name], spec, index)
        made = self._converted(self._made[name], name)
        if tuple(made.shape) != spec.shape:
            parts = [stored for names in self._made[name].stored.values() for stored in names]
            raise ModelFileError(
                f"Tensor {name}, made from {len(parts)} tensors in {self.origin} ({parts[0]}, ...), has shape "
                f"{list(made.shape)}, but the model's config makes it {list(spec.shape)}."
            )
        return made if index is None else made[index]

    def _converted(self, conversion: _Conversion, name: str) -> Tensor:
        converter = copy.deepcopy(conversion.converter)
        for pattern, names in conversion.stored.items():
            converter.collected_tensors[pattern] = [lambda stored=stored: self._whole(stored) for stored in names]
        made = converter.convert(conversion.target, model=self._model, config=self._model.config)
        tensor = made.get(name)
        if tensor is None:
            raise ModelFileError(
                f"Tensor {name} can't be made from {self.origin}: transformers' conversion gives {', '.join(made)}. "
                "Use another version of transformers."
            )
        whole: Tensor = tensor[0] if isinstance(tensor, list) else tensor
        return whole

    def _whole(self, stored: str) -> Tensor:
        shape = self._source.shape(stored) or ()
        return self._source.tensor(stored, TensorSpec(shape, torch.float32))


def _matches(patterns: Any) -> Callable[[str], bool]:
    """Return a function that says whether one of the patterns occurs in a name."""
    found = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in found)
