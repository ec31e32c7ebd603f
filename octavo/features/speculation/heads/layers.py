"""`HeadLayers`: builds drafting heads, and reads their published checkpoints."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from octavo.features.speculation.heads.model import MODELS, HeadModel
from octavo.features.speculation.heads.spec import HeadSpec, Kind, head_spec
from octavo.models.attention import attention_spec, latent_spec
from octavo.models.decoder import CausalLM
from octavo.models.hf_config import Config
from octavo.models.implementation import OWN
from octavo.models.load.checkpoint import Checkpoint
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
    `embed_tokens`; with or without the prefix "model.". Those of multi-token prediction are the target's own:
    `model.layers.N.*` with `enorm`, `hnorm`, `eh_proj` and `shared_head`. What a head lacks of embedding and output
    head is the target's.
    """

    name = ""

    def __init__(self, kind: Kind, target: DecoderSpec, model: CausalLM | None, names: Set[str], source: Checkpoint):
        """
        Args:
            model: the target, if its embedding and head can be used as they are.
            names: tensors of the head's checkpoint; empty for random ones.
            source: the target's checkpoint.
        """
        self._kind: Kind = kind
        self._target, self._model = target, model
        self._bias = any(name.removeprefix("model.") == "fc.bias" for name in names)
        self._source = source

    def spec_of(self, config: Config) -> HeadSpec:
        return head_spec(self._kind, config, self._target, bias=self._bias)

    def attention(self, spec: ModelSpec, mesh: Mesh = ALONE) -> AttentionSpec | LatentSpec:
        assert isinstance(spec, HeadSpec)
        last = spec.decoder.num_layers - 1
        latent = isinstance(spec.decoder.mixer_of(last), LatentSelfAttention)
        return (latent_spec if latent else attention_spec)(spec.decoder, last, mesh)

    def build(self, b: Build, spec: ModelSpec) -> HeadModel:
        assert isinstance(spec, HeadSpec)
        return MODELS[spec.kind](b, spec, self._model)

    def named(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        assert isinstance(spec, HeadSpec)
        head: Checkpoint
        if spec.kind == "mtp":
            own = OWN.named(checkpoint, spec.decoder)
            last = f"model.layers.{spec.decoder.num_layers - 1}."
            tables = {f"{last}embed_tokens.weight": "embed_tokens.weight"}
            tables |= {f"{last}shared_head.head.weight": "lm_head.weight"}
            kept = {tables.get(name, name): name for name in own.names() if name.startswith(last)}
            head = Selected(own, kept) if own.names() else own
        else:
            names = {name.removeprefix("model."): name for name in checkpoint.names()}
            names = {_midlayer(ours) if spec.kind == "eagle3" else ours: name for ours, name in names.items()}
            head = Selected(checkpoint, {ours: name for ours, name in names.items() if ours != "t2d"})
            head = head if checkpoint.names() else checkpoint
        return WithTables(head, OWN.named(self._source, self._target), tied=self._target.tied)


def _midlayer(name: str) -> str:
    """Return the name of EAGLE-3's only layer's tensors, which some call layers.0."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


class Selected:
    """Some tensors of a checkpoint under other names."""

    def __init__(self, source: Checkpoint, stored: dict[str, str]) -> None:
        """`stored`: name here -> name in `source`."""
        self.origin = source.origin
        self._source, self._stored = source, stored

    def names(self) -> Set[str]:
        return self._stored.keys()

    def has(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._source.shape(self._stored[name])

    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        return self._source.blocks(self._stored[name], entry, codes=codes, index=index)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        return self._source.tensor(self._stored[name], spec, index)


class WithTables:
    """A head's checkpoint, with the target's embedding and output head where it has none."""

    def __init__(self, own: Checkpoint, target: Checkpoint, *, tied: bool) -> None:
        self.origin = own.origin
        self._own, self._target = own, target
        embedding = "model.embed_tokens.weight"
        self._tables = {"embed_tokens.weight": embedding, "lm_head.weight": embedding if tied else "lm_head.weight"}

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
