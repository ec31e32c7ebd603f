"""`HeadLayers`: builds drafting heads, and reads their published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

import torch
from torch import Tensor

from octavo.features.speculation.heads.model import MODELS, HeadModel
from octavo.features.speculation.heads.spec import HeadSpec, Kind, head_spec
from octavo.models.attention import attention_spec, latent_spec
from octavo.models.decoder import CausalLM
from octavo.models.hf_config import Config
from octavo.models.implementation import OWN
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.renamed import RenamedCheckpoint
from octavo.models.mixers.spec import LatentSelfAttention
from octavo.models.model import ModelSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.build import Build
from octavo.nn.latent.base import LatentSpec
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec
from octavo.parallel.mesh import ALONE, Mesh


class HeadLayers:
    """An `Implementation` of the heads of one kind, for one target.

    Tensors of an EAGLE head: `fc`, `layers.0.*` (EAGLE) or `midlayer.*` (EAGLE-3), `norm`, `lm_head`, `d2t`, and
    `embed_tokens`; with or without the prefix "model.". Those of multi-token prediction are in the target's checkpoint:
    see `forms.py`. What a head lacks of embedding and output head is the target's.
    """

    name = ""

    def __init__(
        self,
        kind: Kind,
        target: DecoderSpec,
        model: CausalLM | None,
        own: Checkpoint,
        source: Checkpoint,
        needs_torch: str = "",
    ) -> None:
        """
        Args:
            model: the target, if its embedding and head can be used as they are.
            own: the head's checkpoint; without names for random tensors.
            source: the target's checkpoint.
            needs_torch: see `HeadSpec`.
        """
        self._kind: Kind = kind
        self._target, self._model = target, model
        self._own = own
        self._source = source
        self._needs_torch = needs_torch

    def spec_of(self, config: Config) -> HeadSpec:
        spec = head_spec(self._kind, config, self._target, self._own.names())
        return replace(spec, needs_torch=self._needs_torch)

    def attention(self, spec: ModelSpec, mesh: Mesh = ALONE) -> AttentionSpec | LatentSpec:
        assert isinstance(spec, HeadSpec)
        last = spec.decoder.num_layers - 1
        latent = isinstance(spec.decoder.mixer_of(last), LatentSelfAttention)
        return (latent_spec if latent else attention_spec)(spec.decoder, last, mesh)

    def build(self, b: Build, spec: ModelSpec) -> HeadModel:
        assert isinstance(spec, HeadSpec)
        tables: Set[str] = set()
        if self._model is not None and spec.kind != "mtp":  # its tables are the target's by design
            tables = self.named(self._own, spec).own_tables(TensorSpec((spec.vocab_size, spec.hidden_size), b.dtype))
        return MODELS[spec.kind](b, spec, self._model, tables)

    def named(self, checkpoint: Checkpoint, spec: ModelSpec) -> WithTables:
        assert isinstance(spec, HeadSpec)
        if spec.kind == "mtp":
            last = spec.decoder.num_layers - 1
            found = RenamedCheckpoint(checkpoint, spec.form.renaming(last)) if spec.form.marks else checkpoint
            checkpoint, rename = OWN.named(found, spec.decoder), _of_last_layer(last)
        else:
            rename = _eagle3_name if spec.kind == "eagle3" else _eagle_name
        head = RenamedCheckpoint(checkpoint, rename) if checkpoint.names() else checkpoint
        return WithTables(head, OWN.named(self._source, self._target), tied=self._target.tied)


def _of_last_layer(last: int) -> Callable[[str], str | None]:
    """Return the renaming for multi-token prediction: only this layer's tensors, its tables under short names."""
    prefix = f"model.layers.{last}."
    tables = {
        f"{prefix}embed_tokens.weight": "embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }
    return lambda name: tables.get(name, name) if name.startswith(prefix) else None


def _eagle_name(name: str) -> str | None:
    """Return a tensor's name without "model."; None for `t2d`, the inverse of `d2t`."""
    name = name.removeprefix("model.")
    return None if name == "t2d" else name


def _eagle3_name(name: str) -> str | None:
    """Like `_eagle_name`, for EAGLE-3, whose only layer some checkpoints call layers.0."""
    ours = _eagle_name(name)
    if ours is not None and ours.startswith("layers.0."):
        return ours.replace("layers.0.", "midlayer.", 1)
    return ours


class WithTables:
    """A head's checkpoint, with the target's embedding and output head where it has none."""

    def __init__(self, own: Checkpoint, target: Checkpoint, *, tied: bool) -> None:
        self.origin = own.origin
        self._own, self._target = own, target
        embedding = "model.embed_tokens.weight"
        self._tables = {"embed_tokens.weight": embedding, "lm_head.weight": embedding if tied else "lm_head.weight"}

    def own_tables(self, spec: TensorSpec) -> Set[str]:
        """Return which tables of this shape the head has with other values than the target's; many have copies."""
        return {name for name in self._tables if self._own.has(name) and self._differs(name, spec)}

    def _differs(self, name: str, spec: TensorSpec) -> bool:
        if self._own.shape(name) != spec.shape or not self._target.has(self._tables[name]):
            return False  # the latter is quantized
        ours, theirs = self._own.tensor(name, spec), self._target.tensor(self._tables[name], spec)
        return not torch.equal(ours, theirs.to(ours))  # a copy may have been rounded

    def names(self) -> Set[str]:
        return self._own.names()

    def has(self, name: str) -> bool:
        return self._own.has(name) or (name in self._tables and self._target.has(self._tables[name]))

    def _of(self, name: str) -> tuple[Checkpoint, str]:
        return (self._own, name) if self._own.has(name) else (self._target, self._tables[name])

    def shape(self, name: str) -> tuple[int, ...] | None:
        source, stored = self._of(name)
        return source.shape(stored)

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        source, stored = self._of(name)
        return source.blocks(stored, entry, codes=codes, index=index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        source, stored = self._of(name)
        return source.tensor(stored, spec, index)
