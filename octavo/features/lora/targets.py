"""The layers of a loaded model that adapters can change, by the layers' own paths and parts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from torch import nn

from octavo.features.lora.layout import StoredPart, Target, TargetPart
from octavo.models.decoder import DecoderLayer
from octavo.models.load.arranged import rotated_order, stored_module
from octavo.models.spec import DecoderSpec
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.linear import Linear, Projection
from octavo.nn.shard import Cut

Layer = Projection | Embedding


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a model, and the layer of each.

    Attributes:
        cuts: of each target, the features of its parts on this rank.
        orders: of each target and part, the order in which the model has each head's outputs; None if it is the
            checkpoint's.
    """

    targets: tuple[Target, ...]
    layers: tuple[Layer, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    orders: tuple[tuple[tuple[int, ...] | None, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Targets:
        """Return the targets of a model, in the order of its modules."""
        late = _after_mixer(model)
        spec = getattr(model, "spec", None)
        found = [
            (_stored(_target(layer, head=layer is getattr(model, "head", None), late=layer in late), spec), layer)
            for layer in model.modules()
            if isinstance(layer, Linear | TiedHead | Embedding)
        ]
        targets, layers = zip(*found, strict=True) if found else ((), ())
        orders = tuple(_orders(target, spec) for target in targets)
        return cls(targets, layers, tuple(_cuts(layer) for layer in layers), orders)


def _after_mixer(model: nn.Module) -> set[nn.Module]:
    """Return the layers that compute only the chosen tokens of a step."""
    layers = getattr(model, "layers", ())
    last = layers[len(layers) - 1] if len(layers) else None
    return set(last.after_mixer) if isinstance(last, DecoderLayer) else set()


def _target(layer: Layer, *, head: bool, late: bool) -> Target:
    if isinstance(layer, Embedding):
        return Target(layer.path, (TargetPart("", layer.rows, layer.size, layer.rows, layer.size),), embedding=True)
    if isinstance(layer, TiedHead):
        inputs, outputs = layer.source.size, layer.source.rows
        return Target(layer.path, (TargetPart("", inputs, outputs, inputs, outputs),), head=True)
    assert isinstance(layer, Linear)
    parts = [
        TargetPart(
            part.name,
            part.in_features,
            part.out_features,
            part.in_features if cut.inputs is None else len(cut.inputs),
            part.out_features if cut.outputs is None else len(cut.outputs),
        )
        for part, cut in zip(layer.parts, layer.cuts, strict=True)
    ]
    return Target(layer.path, tuple(parts), head=head, late=late)


def _stored(target: Target, spec: object) -> Target:
    """Return the target, with the modules of the checkpoint where they differ from its parts."""
    if not isinstance(spec, DecoderSpec):
        return target
    parts = []
    for i, part in enumerate(target.parts):
        name, rows = stored_module(target.name(i), spec)
        same = name == target.name(i) and not rows[2]
        parts.append(part if same else msgspec.structs.replace(part, stored=StoredPart(name, *rows)))
    return msgspec.structs.replace(target, parts=tuple(parts))


def _cuts(layer: Layer) -> tuple[Cut, ...]:
    return tuple(layer.cuts) if isinstance(layer, Linear) else (Cut(),)


def _orders(target: Target, spec: object) -> tuple[tuple[int, ...] | None, ...]:
    if not isinstance(spec, DecoderSpec):
        return (None,) * len(target.parts)
    return tuple(rotated_order(f"{target.name(part)}.weight", spec)[0] for part in range(len(target.parts)))
