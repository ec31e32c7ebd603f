"""`Modules`: the layers of a model by the names that adapters' files have for them. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.features.lora.layout import Target

Place = tuple[int, int]
"""Indices of a target and of its part."""


class Modules:
    """Depends on the model only, so that it is made once for all adapters. Never changed.

    Attributes:
        name: place -> its name in the checkpoint.
        outputs: place -> the outputs of the checkpoint's module that holds it.
        renamed: places whose module has another name in the checkpoint than in the model -> how the latter ends.
        stacks: module of Transformers -> its tensors of all experts -> the projections that each holds.
        experts: the number of experts of each such tensor.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self.name: dict[Place, str] = {}
        self.outputs: dict[Place, int] = {}
        self.renamed: dict[Place, str] = {}
        self.stacks: dict[str, dict[str, list[Place]]] = {}
        self.experts: dict[str, int] = {}
        places: dict[str, list[Place]] = {}
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
                    self.stacks.setdefault(module, {}).setdefault(part.stack.name, []).append((i, j))
                    self.experts[part.stack.name] = max(self.experts.get(part.stack.name, 0), target.expert + 1)
        # Adapters of a model without a head lack the first part of the path.
        short = {name.partition(".")[2]: held for name, held in places.items() if "." in name}
        self._places: Mapping[str, list[Place]] = short | places

    def held(self, module: str) -> list[Place]:
        """Return the projections of a module. What comes before the layers in its path may have another name, as it has
        in the versions of some classes."""
        return self._places.get(module) or self._places.get(module.partition(".")[2], [])
