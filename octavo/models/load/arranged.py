"""Checkpoints whose tensors have other names, or are arranged otherwise, than those of Octavo's decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.hub.gguf_names import is_gguf
from octavo.models.load.alternating_heads import head_order
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.gguf_latents import with_joined_latents
from octavo.models.load.gguf_layout import gguf_names
from octavo.models.load.quantized.view import QuantizedCheckpoint
from octavo.models.load.renamed import with_root, with_text_half
from octavo.models.mixers.spec import LatentSelfAttention
from octavo.models.spec import DecoderSpec, StoredModule, StoredNames, StoredStack
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec, part_of

ROOT = "model"
"""The prefix of the decoder's tensors, except `_OUTSIDE`."""
_OUTSIDE = ("lm_head", "rope_freqs")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ROTATED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(\w+)\.")


@dataclass(frozen=True, slots=True)
class _Selection:
    """The rows of a stored tensor that make up one of the decoder's.

    Attributes:
        name: the stored tensor.
        begin, end, run: rows [begin, end) of each `run` rows; run 0 takes all.
        order: order of each head's rows; None keeps it.
        elementwise: `order` is that of each head's elements, not rows.
        columns: the stored column of each column; None keeps them.
        shift: added to all elements.
        entry: the part of the first dimension that holds the decoder's tensor; None for all. It comes before all else.
        form: as in `StoredModule`.
    """

    name: str
    transposed: bool = False
    begin: int = 0
    end: int = 0
    run: int = 0
    order: tuple[int, ...] | None = None
    elementwise: bool = False
    shift: float = 0.0
    entry: int | None = None
    form: str = ""
    columns: tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        return not self.changes_rows and self.entry is None

    @property
    def changes_rows(self) -> bool:
        """Whether the stored matrix is another than the decoder's."""
        return bool(self.transposed or self.run or self.order or self.shift or self.form or self.columns)

    def read(self, source: Checkpoint, spec: TensorSpec) -> Tensor:
        """Return the stored tensor, or its entry."""
        if self.entry is None:
            return source.tensor(self.name, spec)
        shape = source.shape(self.name)
        assert shape is not None, "a checkpoint of stacks has shapes"
        index = (slice(self.entry, self.entry + 1), *(slice(0, size) for size in shape[1:]))
        return source.tensor(self.name, spec, index)[0]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the decoder's tensor."""
        match self.form:
            case "decay":
                tensor = tensor.float().neg().log()
                tensor = tensor.squeeze(-1)
            case "flat":
                tensor = tensor.flatten()
            case "taps" if tensor.dim() > 1:
                tensor = tensor[:, None]
        if self.transposed and tensor.dim() == 2:
            tensor = tensor.T
        if self.run:
            tensor = tensor.unflatten(0, (-1, self.run))[:, self.begin : self.end].flatten(0, 1)
        if self.order is not None:
            rest = () if self.elementwise else tensor.shape[1:]
            tensor = tensor.reshape(-1, len(self.order), *rest)[:, list(self.order)].reshape(tensor.shape)
        if self.columns is not None and tensor.dim() == 2:
            tensor = tensor[:, list(self.columns)]
        return tensor + self.shift if self.shift else tensor


class ArrangedCheckpoint:
    """A view of `source` with the names and arrangement of the decoder."""

    def __init__(self, source: Checkpoint, spec: DecoderSpec, stored: StoredNames) -> None:
        self.origin = source.origin
        self._source = source
        self._selections = dict(_selections(source, spec, stored))

    def names(self) -> Set[str]:
        return self._selections.keys()

    def has(self, name: str) -> bool:
        return name in self._selections

    def shape(self, name: str) -> tuple[int, ...] | None:
        selection = self._selections[name]
        stored = self._source.shape(selection.name)
        if stored is None or selection.is_plain:
            return stored
        of_entry = stored if selection.entry is None else stored[1:]
        return self._of(name, torch.empty(of_entry, device="meta")).shape

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        selection = self._selections[name]
        assert entry is None, "the decoder's tensors are matrices"
        whole = selection.transposed and selection.entry is None
        own = None if selection.changes_rows else index
        blocks = None if whole else self._source.blocks(selection.name, selection.entry, codes=codes, index=own)
        if blocks is None or not selection.changes_rows:
            return blocks
        rows = self._of(name, torch.arange(len(blocks.values)))
        minima = None if blocks.minima is None else blocks.minima[rows]
        ordered = replace(blocks, values=blocks.values[rows], scales=blocks.scales[rows], minima=minima)
        return part_of(ordered if selection.columns is None else ordered.with_columns(selection.columns), index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        selection = self._selections[name]
        if selection.is_plain:
            return self._source.tensor(selection.name, spec, index)
        tensor = self._of(name, selection.read(self._source, spec))
        return tensor if index is None else tensor[index]

    def _of(self, name: str, tensor: Tensor) -> Tensor:
        return self._selections[name].of(tensor)


def arranged(checkpoint: Checkpoint, spec: DecoderSpec) -> Checkpoint:
    """Return the checkpoint as the decoder of this spec reads it; the same checkpoint if it is stored that way."""
    if is_gguf(checkpoint.names()):
        checkpoint = with_joined_latents(checkpoint)
        return ArrangedCheckpoint(checkpoint, spec, gguf_names(spec, checkpoint.names()))
    if spec.stored.nested:
        checkpoint = with_text_half(checkpoint)
    if spec.stored.root == ROOT:
        checkpoint = with_root(checkpoint, ROOT)
    plain = replace(spec.stored, nested=False) == StoredNames()
    if not checkpoint.names() or (plain and all(spec.rope_of(i).order is None for i in range(spec.num_layers))):
        return checkpoint
    return ArrangedCheckpoint(checkpoint, spec, spec.stored)


def _selections(source: Checkpoint, spec: DecoderSpec, stored: StoredNames) -> Iterator[tuple[str, _Selection]]:
    names = source.names()
    quantized = source.quantized if isinstance(source, QuantizedCheckpoint) else frozenset()
    modules = {module.name: module for module in stored.modules}
    stacks = {stack.name: stack for stack in stored.stacks}
    roots = (f"{stored.root}.", f"{stored.root.rpartition('.')[2]}.", f"{ROOT}.")
    root = next((root for root in roots if any(name.startswith(root) for name in names)), "")
    for name in names:
        if name.endswith(stored.ignored or ("\n",)) or name.startswith(stored.foreign or ("\n",)):
            continue
        below = name.removeprefix(root)
        numbers, pattern = _NUMBER.findall(f".{below}"), _NUMBER.sub("{}", f".{below}")[1:]
        if pattern in stacks:
            yield from _entries(name, numbers[0], stacks[pattern], source.shape(name) or ())
            continue
        module, _, suffix = (pattern, "", "") if pattern in modules else pattern.rpartition(".")
        rule = modules.get(below.rpartition(".")[0]) or modules.get(module, StoredModule(module, (module,)))
        inside = name.startswith(root)
        for i, target in enumerate(rule.names):
            path = f"{target.format(*numbers)}.{suffix}".removesuffix(".")
            full = f"{ROOT}.{path}" if inside and not path.startswith(_OUTSIDE) else path
            begin = sum(rule.sizes[:i])
            end = begin + rule.sizes[i] if rule.sizes else 0
            shift = rule.shift if suffix == "weight" else 0.0
            order, elementwise = rotated_order(full, spec)
            columns = None
            if stored.alternating_heads and order is None:
                order, columns = head_order(full, spec)
            run = sum(rule.sizes)
            transposed = rule.transposed and name not in quantized
            yield (
                full,
                _Selection(
                    name, transposed, begin, end, run, order, elementwise, shift, form=rule.form, columns=columns
                ),
            )


def stored_module(name: str, spec: DecoderSpec) -> tuple[str, tuple[int, int, int]]:
    """Return where a checkpoint has a module of the decoder: the name there, and which of the rows there are the
    module's, [begin, end) of each run; a run of 0 for all."""
    stored = spec.stored
    below = name.removeprefix(f"{ROOT}.")
    numbers, pattern = _NUMBER.findall(f".{below}."), _NUMBER.sub("{}", f".{below}.")[1:-1]
    root = "" if below.startswith(_OUTSIDE) or not stored.root else f"{stored.root}."
    for rule in stored.modules:
        own = below if below in rule.names else pattern
        if own in rule.names:
            i = rule.names.index(own)
            begin = sum(rule.sizes[:i])
            rows = (begin, begin + rule.sizes[i], sum(rule.sizes)) if rule.sizes else (0, 0, 0)
            return root + rule.name.format(*numbers), rows
    return root + below, (0, 0, 0)


def stored_stack(name: str, outputs: int, spec: DecoderSpec) -> tuple[str, int, int, int, bool] | None:
    """Return where Transformers has a projection of an expert with this number of outputs: the tensor of all experts,
    which of its rows are the projection's, as `stored_module` does, and whether it is transposed; None if it is in no
    such tensor."""
    below = f"{name.removeprefix(f'{ROOT}.')}.weight"
    numbers, pattern = _NUMBER.findall(f".{below}"), _NUMBER.sub("{}", f".{below}")[1:]
    for stack in spec.stored.stacks:
        if pattern in stack.names:
            i, parts = stack.names.index(pattern), len(stack.names)
            each = 1 if stack.alternating else outputs
            rows = (i * each, (i + 1) * each, each * parts) if parts > 1 else (0, 0, 0)
            root = f"{spec.stored.root}." if spec.stored.root else ""
            return root + stack.name.format(numbers[0]), *rows, stack.transposed
    return None


def _entries(name: str, layer: str, stack: StoredStack, shape: Sequence[int]) -> Iterator[tuple[str, _Selection]]:
    """Yield the tensors of each expert of a stack of this shape."""
    parts, transposed = len(stack.names), stack.transposed or stack.inputs not in (0, shape[-1])
    rows = shape[-1] if transposed or len(shape) == 2 else shape[1]
    each = 1 if stack.alternating else rows // parts
    for expert in range(shape[0]):
        for i, target in enumerate(stack.names):
            run = each * parts if parts > 1 else 0
            own = _Selection(name, transposed, i * each, (i + 1) * each, run, entry=expert)
            yield f"{ROOT}.{target.format(layer, expert)}", own


def rotated_order(name: str, spec: DecoderSpec) -> tuple[tuple[int, ...] | None, bool]:
    """Return the order of each head's channels in a tensor or module of this name, in the decoder's names; None if it
    is as stored. The second value: the tensor has elements of channels, not rows."""
    match = _ROTATED.match(name)
    if match is not None and int(match[1]) >= spec.num_layers:
        return None, False  # of a layer behind the model's, such as one for multi-token prediction
    order = None if match is None else spec.rope_of(int(match[1])).order
    if match is None or order is None:
        return None, False
    mixer, module = spec.mixer_of(int(match[1])), match[2]
    if isinstance(mixer, LatentSelfAttention):
        leading = mixer.leading(module)
        return None if leading is None else (*range(leading), *(leading + i for i in order)), False
    return order if module in ("q_proj", "k_proj", "q_norm", "k_norm") else None, module in ("q_norm", "k_norm")
