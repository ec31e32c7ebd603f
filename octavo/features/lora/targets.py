"""The layers of a loaded model that adapters can change, by the layers' own paths and parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from torch import nn

from octavo.features.lora.layout import StackedPart, StoredPart, Target, TargetPart
from octavo.models.decoder import CausalLM, DecoderLayer
from octavo.models.load.arranged import rotated_order, stored_module, stored_stack
from octavo.models.spec import DecoderSpec
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.experts import ExpertLayer
from octavo.nn.linear import Linear, Projection
from octavo.nn.quant.base import Part
from octavo.nn.quant.experts import SingleExperts
from octavo.nn.shard import Cut

Layer = Projection | Embedding | ExpertLayer


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a model, and the layer of each; None in place of a layer that another stage of a pipeline has.

    Attributes:
        cuts: of each target, the features of its parts on this rank.
        orders: of each target and part, the order in which the model has each head's outputs; None if it is the
            checkpoint's.
    """

    targets: tuple[Target, ...]
    layers: tuple[Layer | None, ...]
    cuts: tuple[tuple[Cut, ...], ...]
    orders: tuple[tuple[tuple[int, ...] | None, ...], ...]

    @classmethod
    def of(cls, model: nn.Module, whole: nn.Module | None = None) -> Targets:
        """Return the targets of a model, in the order of its modules, with the products of experts where their weights
        allow it.

        Args:
            whole: a model with the layers of all stages, without weights, if `model` has those of one.
        """
        own = None if whole is None else _own_layers(model)
        model = model if whole is None else whole
        late = _after_mixer(model)
        spec = getattr(model, "spec", None)
        targets: list[Target] = []
        layers: list[Layer | None] = []
        cuts: list[tuple[Cut, ...]] = []

        def add(target: Target, layer: Layer, cut: tuple[Cut, ...]) -> None:
            targets.append(_stored(target, spec))
            layers.append(layer if own is None else own.get(_name(layer)))
            cuts.append(cut)

        for layer in model.modules():
            if layer is getattr(model, "positions", None):
                continue  # its rows are not those of token ids
            if isinstance(layer, Linear | TiedHead | Embedding):
                add(_target(layer, head=layer is getattr(model, "head", None), late=layer in late), layer, _cuts(layer))
            elif isinstance(layer, ExpertLayer) and isinstance(layer.scheme, SingleExperts):
                for target, cut in _of_experts(layer, late=layer in late):
                    add(target, layer, cut)
        return cls(tuple(targets), tuple(layers), tuple(cuts), tuple(_orders(target, spec) for target in targets))

    @property
    def own(self) -> frozenset[int]:
        """The indices of the targets whose layers are here."""
        return frozenset(i for i, layer in enumerate(self.layers) if layer is not None)


def _own_layers(model: nn.Module) -> dict[tuple[str, ...], Layer]:
    """Return the layers of a stage by name. Its last one may have the embeddings, as the weights of a tied head."""
    embeds = not isinstance(model, CausalLM) or not model.layer_range.start
    kinds = (Linear, TiedHead, ExpertLayer, Embedding) if embeds else (Linear, TiedHead, ExpertLayer)
    return {_name(layer): layer for layer in model.modules() if isinstance(layer, kinds)}


def _name(layer: Layer) -> tuple[str, ...]:
    """Return a layer's path and the names of its parts, which tell the layers of one path apart."""
    return (layer.path, *(part.name for part in layer.parts)) if isinstance(layer, Linear) else (layer.path,)


def _after_mixer(model: nn.Module) -> set[nn.Module]:
    """Return the layers that compute only the chosen tokens of a step."""
    layers = getattr(model, "layers", ())
    last = layers[len(layers) - 1] if len(layers) else None
    if not isinstance(last, DecoderLayer):
        return set()
    mixtures = () if last.mlp is None else (one for one in last.mlp.modules() if isinstance(one, ExpertLayer))
    return {*last.after_mixer, *mixtures}


def _target(layer: Layer, *, head: bool, late: bool) -> Target:
    if isinstance(layer, Embedding):
        return Target(layer.path, (TargetPart("", layer.rows, layer.size, layer.rows, layer.size),), embedding=True)
    if isinstance(layer, TiedHead):
        inputs, outputs = layer.source.size, layer.source.rows
        own = outputs if layer.source.own is None else len(layer.source.own)
        return Target(layer.path, (TargetPart("", inputs, outputs, inputs, own),), head=True, tied=True)
    assert isinstance(layer, Linear)
    parts = tuple(_part(part, cut) for part, cut in zip(layer.parts, layer.cuts, strict=True))
    return Target(layer.path, parts, head=head, late=late)


def _of_experts(layer: ExpertLayer, *, late: bool) -> Iterator[tuple[Target, tuple[Cut, ...]]]:
    """Yield the two products of each expert, the one before the gate first."""
    for expert in range(layer.form.num_experts):
        for product in layer.products:
            parts = tuple(_part(part, cut) for part, cut in product)
            yield Target(f"{layer.path}.{expert}", parts, late=late, expert=expert), tuple(cut for _, cut in product)


def _part(part: Part, cut: Cut) -> TargetPart:
    return TargetPart(
        part.name,
        part.in_features,
        part.out_features,
        part.in_features if cut.inputs is None else len(cut.inputs),
        cut.num_outputs(part.out_features),
    )


def _stored(target: Target, spec: object) -> Target:
    """Return the target, with the modules of the checkpoint where they differ from its parts."""
    if not isinstance(spec, DecoderSpec):
        return target
    parts = []
    for i, part in enumerate(target.parts):
        name, rows = stored_module(target.name(i), spec)
        stored = None if name == target.name(i) and not rows[2] else StoredPart(name, *rows)
        stack = None
        if target.expert >= 0 and (found := stored_stack(target.name(i), part.outputs, spec)) is not None:
            stack = StackedPart(*found)
        parts.append(msgspec.structs.replace(part, stored=stored, stack=stack))
    return msgspec.structs.replace(target, parts=tuple(parts))


def _cuts(layer: Linear | TiedHead | Embedding) -> tuple[Cut, ...]:
    if isinstance(layer, TiedHead):
        return (Cut(outputs=None if layer.source.own is None else (layer.source.own,)),)
    return tuple(layer.cuts) if isinstance(layer, Linear) else (Cut(),)


def _orders(target: Target, spec: object) -> tuple[tuple[int, ...] | None, ...]:
    if not isinstance(spec, DecoderSpec):
        return (None,) * len(target.parts)
    return tuple(rotated_order(f"{target.name(part)}.weight", spec)[0] for part in range(len(target.parts)))
