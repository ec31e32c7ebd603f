"""`Model`: the runner's interface to language models; and `compiled`, the fastest form of one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from octavo.core.spans import Spans, Watched
from octavo.models.decoder import CausalLM
from octavo.models.mixers.table import MIXERS
from octavo.models.native import NativeDecoder, emits, reason_against
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.native import NativeBackend
from octavo.nn.build import AnyBackend
from octavo.nn.cached import CachedLayer
from octavo.nn.step import StepInput
from octavo.parallel.mesh import ALONE, Mesh

log = logging.getLogger(__name__)


class ModelSpec(Protocol):
    """What worker and scheduler must know of a decoder: a dataclass, whose fields say which weights fit.

    Attributes:
        intermediate_size: outputs of the widest linear layer in front of another one.
        tied: whether the output head is the embedding table.
        max_position: maximum number of tokens of a sequence.
        lacking: what the CPU's kernels lack to run it as a native program; None for nothing.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tied(self) -> bool: ...

    @property
    def max_position(self) -> int: ...

    @property
    def lacking(self) -> str | None: ...

    def within(self, max_length: int | None) -> Self:
        """Return the spec for sequences of at most this many tokens; None for the model's own limit."""
        ...

    def without_windows(self) -> Self:
        """Return the spec with full attention in all layers, for sequences shorter than any window."""
        ...


class Model(Protocol):
    """A decoder-only language model in three steps; see `CausalLM`."""

    attention_layers: list[PagedAttention]

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def cached_layers(self) -> Sequence[CachedLayer]: ...

    def embed(self, step: StepInput) -> Tensor: ...

    def forward(self, x: Tensor, step: StepInput) -> Tensor: ...

    def final(self, hidden: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class LayeredModel(Model, Protocol):
    """A model of layers in torch, which the loader fills.

    Attributes:
        residual_dtype: of the residual stream.
        recordable: whether its steps can be recorded in graphs, since no data passes between host and device.
    """

    residual_dtype: torch.dtype
    recordable: bool

    def modules(self) -> Iterator[nn.Module]: ...


class EncoderModel(Protocol):
    """A model with hidden states but without tokens; see `Encoder`."""

    def embed(self, step: StepInput) -> Tensor: ...

    def forward(self, x: Tensor, step: StepInput) -> Tensor: ...

    def final(self, hidden: Tensor) -> Tensor: ...

    def classify(self, pooled: Tensor) -> Tensor: ...


def watch_model(spans: Spans, model: Model | EncoderModel) -> None:
    """Record the model's steps in a profile's spans."""
    for method, name in (("embed", "embed"), ("forward", "layers"), ("logits", "head"), ("final", "final norm")):
        if hasattr(model, method):
            spans.watch(Watched(model, method, name))


def compiled(
    model: LayeredModel,
    attention: AnyBackend,
    activation_dtype: str = "int16",
    mesh: Mesh = ALONE,
    name: str = "the model",
    *,
    exchanges_rows: bool = False,
) -> Model:
    """Compile the model, or a stage of one, to a native program if possible, else return it unchanged. Its weights must
    be loaded.

    Args:
        mesh, exchanges_rows: see `reason_against`.
        name: of the model, for the log.
    """
    unchanged: Model = model
    if not isinstance(attention, NativeBackend) or not emits(model):
        return unchanged
    reason = reason_against(model.spec, mesh, exchanges_rows=exchanges_rows)
    if isinstance(model, CausalLM) and not _has_mixers_of_spec(model):
        reason = reason or "its layers are not those of its spec"
    if reason is None:
        return NativeDecoder(model, attention.pool, activation_dtype)
    log.warning(
        "%s runs layer by layer in torch instead of as one native program, which takes 2 to 6 times as long where both "
        "can be had (docs/cpu.md): %s",
        name,
        reason,
    )
    return unchanged


def _has_mixers_of_spec(model: CausalLM) -> bool:
    """Return whether the layers' mixers are those of the spec, which says what they lack."""
    for i, layer in enumerate(model.layers, model.layer_range.start):
        kind, mixer = model.spec.mixer_of(i), getattr(layer, "mixer", None)
        own: object = None if kind is None else MIXERS[type(kind)]
        if mixer is not None and type(mixer) is not own:
            return False
    return True
