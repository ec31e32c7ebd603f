"""`Model`: the runner's interface to language models; and `compiled`, the fastest implementation of one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from octavo.core.spans import Spans, Watched
from octavo.models.decoder import CausalLM
from octavo.models.native import NativeDecoder, reason_against
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionBackend
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.native import NativeAttention
from octavo.nn.cached import CachedLayer
from octavo.nn.step import StepInput

log = logging.getLogger(__name__)


class Model(Protocol):
    """A decoder-only language model in three steps; see `CausalLM`."""

    spec: DecoderSpec
    attention_layers: list[PagedAttention]

    @property
    def cached_layers(self) -> Sequence[CachedLayer]: ...

    def embed(self, step: StepInput) -> Tensor: ...

    def forward(self, x: Tensor, step: StepInput) -> Tensor: ...

    def final(self, hidden: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


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


def compiled(model: CausalLM, attention: AttentionBackend, activation_dtype: str = "int16") -> Model:
    """Compile the model to a native program if possible, else return it unchanged. Its weights must be loaded."""
    if not isinstance(attention, NativeAttention):
        return model
    reason = reason_against(model.spec)
    if len(model.cached_layers) > len(model.attention_layers):
        reason = "it has recurrent layers"
    if reason is None:
        return NativeDecoder(model, attention.pool, activation_dtype)
    log.warning("the model runs layer by layer in torch instead of as one native program: %s", reason)
    return model
