"""`BridgedLM`: a model of transformers' modules, in the three steps of Octavo's models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.features.bridge.attention import PLACE, STEP, PagedStep
from octavo.features.bridge.halves import halves
from octavo.features.bridge.layers import Multiplying, Place, SharedHead, Tensors, tensors_of
from octavo.features.bridge.spec import BridgedSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.quant.base import Part
from octavo.nn.shard import NONE
from octavo.nn.step import StepInput


class BridgedLM(nn.Module):
    """A decoder-only language model; see `CausalLM`. Hidden states are those after the final norm.

    Attributes:
        attention_layers: in layer order.
    """

    def __init__(self, b: Build, spec: BridgedSpec, model: PreTrainedModel) -> None:
        """
        Args:
            model: without weights; it becomes part of this one.
        """
        super().__init__()
        self.spec = spec
        self.recordable = spec.recordable
        self.residual_dtype = b.dtype
        self.attention_layers = [self._attend(b, model, layer.path, i) for i, layer in enumerate(spec.layers)]
        self.cached_layers = self.attention_layers
        self.holders = nn.ModuleList(_put_layers(b, model))
        self.embedding: nn.Module = model.get_input_embeddings()
        self.body, self.head = halves(model)

    def _attend(self, b: Build, model: nn.Module, path: str, index: int) -> PagedAttention:
        layer = b.at(path).attention(self.spec.attention(index))
        setattr(model.get_submodule(path), PLACE, layer)
        return layer

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size], which the caller may modify."""
        embedded: Tensor = self.embedding(step.input_ids[None])[0]
        return embedded

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers on x [T, hidden_size]; return the final states: [T, hidden_size], or [S, hidden_size] of
        `step.hidden_rows`. Reads and writes the KV caches."""
        output = self.body(
            inputs_embeds=x[None], position_ids=step.positions[None], use_cache=False, **{STEP: PagedStep(step)}
        )
        states: Tensor = output.last_hidden_state[0]
        return states if step.hidden_rows is None else states.index_select(0, step.hidden_rows)

    def final(self, hidden: Tensor) -> Tensor:
        """Return hidden [S, hidden_size], which is normalized already."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head: [S, hidden_size] to [S, vocab_size]."""
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def _put_layers(b: Build, model: PreTrainedModel) -> Iterator[Tensors]:
    """Replace linear layers by Octavo's; yield what holds all other tensors."""
    places = _places(model)
    precise = _precise(model, b.dtype)
    held: dict[str, Tensors] = {}
    for path, module in list(model.named_modules()):
        own = [places[tensor] for _, tensor, _ in tensors_of(module)]
        if _is_linear(module, own) and not any(precise(place.name) for place in own):
            _replace(b, model, path, module)
            continue
        mine = [place for place in own if place.stored and place.owners[0][0] is module]
        for place in own:
            if not place.stored and place.owners[0][0] is module:
                place.set(place.tensor.to(b.device))
        if mine:
            dtypes = [_dtype(place.tensor, b.dtype, precise=precise(place.name)) for place in mine]
            holder = Tensors(path, b.device, mine, dtypes)
            held |= {place.name: holder for place in mine}
            yield holder
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight in places and head.bias is None:
        _share(b, model, head, places[head.weight], held)


def _places(model: nn.Module) -> dict[Tensor, Place]:
    """Return all tensors of a model, each with the modules that share it."""
    places: dict[Tensor, Place] = {}
    for path, module in model.named_modules():
        for attribute, tensor, stored in tensors_of(module):
            name = f"{path}.{attribute}" if path else attribute
            place = places.setdefault(tensor, Place(name, tensor, stored))
            place.owners.append((module, attribute))
    return places


def _is_linear(module: nn.Module, own: list[Place]) -> bool:
    """Return whether a module is a linear layer with weights of its own. A class derived from it may do more."""
    return type(module) is nn.Linear and all(len(place.owners) == 1 for place in own)


def _replace(b: Build, model: PreTrainedModel, path: str, module: nn.Module) -> None:
    assert isinstance(module, nn.Linear)
    parent, _, name = path.rpartition(".")
    layer = b.at(parent).linear(
        name,
        inputs=module.in_features,
        outputs=module.out_features,
        shard=NONE,
        bias=module.bias is not None,
    )
    _set(model, path, Multiplying(layer, wide=module is model.get_output_embeddings()))


def _share(b: Build, model: PreTrainedModel, head: nn.Linear, place: Place, held: dict[str, Tensors]) -> None:
    """Let the head multiply with the table that `place` is."""
    path = next(path for path, module in model.named_modules() if module is head)
    scheme = b.schemes.at(path, [Part("", head.in_features, head.out_features)])
    place.owners = [(module, attribute) for module, attribute in place.owners if module is not head]
    _set(model, path, Multiplying(SharedHead(path, b.device, scheme, held[place.name], place.name), wide=True))


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _precise(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a function that says whether a tensor of this name stays in float32, as its family requires."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not kept:
        return lambda name: False
    # As transformers does: the names of modules or tensors, as whole parts of a path.
    found = re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(kept)))
    return lambda name: found.search(name) is not None


def _dtype(tensor: Tensor, dtype: torch.dtype, *, precise: bool) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if precise or not isinstance(tensor, nn.Parameter) else dtype
