"""`Modules`: the layers of a model by the names that adapters' files have for them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from octavo.features.lora.layout import Target
from octavo.hub.text_names import in_text_half

T = TypeVar("T")

_ROOTS = ("model", "transformer", "backbone", "gpt_neox", "module", "_orig_mod")
"""What may come before the layers: the versions of some classes differ, and wrappers leave names of their own."""

Place = tuple[int, int]
"""Indices of a target and of its part."""


class Modules:
    """Depends on the model only, so that it is made once for all adapters. Never changed.

    Attributes:
        name: place -> its name in the checkpoint.
        outputs: place -> the outputs of the checkpoint's module that holds it.
        renamed: places whose module has another name in the checkpoint than in the model -> how the latter ends.
        experts: the number of experts of each such tensor.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.name: dict[Place, str] = {}
        self.outputs: dict[Place, int] = {}
        self.renamed: dict[Place, str] = {}
        self.experts: dict[str, int] = {}
        places: dict[str, list[Place]] = {}
        stacks: dict[str, dict[str, list[Place]]] = {}
        for i, target in enumerate(targets):
            for j, part in enumerate(target.parts):
                stored, own = target.stored(j), target.name(j)
                self.name[i, j], self.outputs[i, j] = stored.name, stored.outputs(part.outputs)
                if own != stored.name:
                    self.renamed[i, j] = own.removeprefix("model.")
                for name in {stored.name, own}:
                    places.setdefault(name, []).append((i, j))
                if part.stack is not None:
                    module = part.stack.name.rpartition(".")[0]
                    stacks.setdefault(module, {}).setdefault(part.stack.name, []).append((i, j))
                    self.experts[part.stack.name] = max(self.experts.get(part.stack.name, 0), target.expert + 1)
        self._places: Mapping[str, list[Place]] = _without_root(places) | places
        self._stacks: Mapping[str, Mapping[str, list[Place]]] = _without_root(stacks) | stacks

    def held(self, module: str) -> list[Place]:
        """Return the projections of a module."""
        return next((self._places[name] for name in _names(module) if name in self._places), [])

    def stacks_of(self, module: str) -> Mapping[str, list[Place]]:
        """Return the tensors of all experts of a module of Transformers, each with the projections that it holds."""
        return next((self._stacks[name] for name in _names(module) if name in self._stacks), {})


def _without_root(named: Mapping[str, T]) -> dict[str, T]:
    """Return them by the names that adapters of a model without a head have, which lack the first part."""
    return {name.partition(".")[2]: value for name, value in named.items() if "." in name}


def _names(module: str) -> Iterator[str]:
    """Yield the names that a file's module may have here: its own, that of a text half, that below another root. Not
    that below any name: those of layers in encoders of images are otherwise the same."""
    yield module
    if (inner := in_text_half(module)) is not None:
        yield inner
    root, _, below = module.partition(".")
    if root in _ROOTS:
        yield below
