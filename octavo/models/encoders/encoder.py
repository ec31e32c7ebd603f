"""The post-norm encoder of all families: BERT's architecture, with variations given in `EncoderSpec`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.models.encoders.layered import LayeredEncoder
from octavo.models.encoders.spec import EncoderSpec, Head
from octavo.nn.attention.whole import attend_whole
from octavo.nn.build import Build
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.step import StepInput

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}


_TRAINING = ("cls.", "lm_head.", "vocab_")


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by its residual sum and a norm."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, step: StepInput, /) -> Tensor: ...

    def __init__(self, b: Build, spec: EncoderSpec) -> None:
        super().__init__()
        names, size = spec.names, spec.hidden_size
        heads = Heads(spec.num_heads, spec.num_heads, spec.head_dim)
        self.head_dim = spec.head_dim
        self.activation = ACTIVATIONS[spec.activation]
        self.qkv = b.linear(*names.qkv, inputs=size, outputs=size, shard=heads, bias=True)
        self.out = b.linear(names.out, inputs=size, outputs=size, shard=ROW, bias=True)
        self.attention_norm = b.layer_norm(names.attention_norm, size, spec.norm_eps)
        self.up = b.linear(names.up, inputs=size, outputs=spec.intermediate_size, shard=COL, bias=True)
        self.down = b.linear(names.down, inputs=spec.intermediate_size, outputs=size, shard=ROW, bias=True)
        self.output_norm = b.layer_norm(names.output_norm, size, spec.norm_eps)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv.split(self.qkv(x)))
        attended = attend_whole(q, k, v, step.attn.groups).flatten(1)
        x = self.attention_norm(self.out(attended).add_(x))
        return self.output_norm(self.down(self.activation(self.up(x))).add_(x))


class ClassificationHead(nn.Module):
    """Computes labels from a pooled state."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, head: Head, size: int, num_labels: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[head.activation]
        self.dense = b.linear(head.dense, inputs=size, outputs=size, shard=NONE, bias=True) if head.dense else None
        self.labels = b.linear(head.labels, inputs=size, outputs=num_labels, shard=NONE, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the labels' logits: [R, H] to [R, labels]."""
        if self.dense is not None:
            pooled = self.activation(self.dense(pooled))
        return self.labels(pooled)


class Encoder(LayeredEncoder):
    """An encoder with the interface of `EncoderModel`.

    Attributes:
        spec: its architecture.
        unneeded: prefixes of tensor names that checkpoints have in addition: heads for training, and unused poolers.
    """

    def __init__(self, b: Build, spec: EncoderSpec, root: str) -> None:
        """
        Args:
            root: prefix of the encoder's names in this checkpoint: the family's, or "".
        """
        super().__init__(b.dtype)
        self.spec = spec
        model = b.at(root)
        embeddings = model.at("embeddings")
        self.words = embeddings.embedding("word_embeddings", spec.vocab_size, spec.hidden_size)
        self.positions = embeddings.embedding("position_embeddings", spec.num_positions, spec.hidden_size)
        self.types = (
            embeddings.embedding("token_type_embeddings", spec.token_types, spec.hidden_size)
            if spec.token_types
            else None
        )
        self.norm = embeddings.layer_norm("LayerNorm", spec.hidden_size, spec.norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(model.at(spec.names.layers, i), spec) for i in range(spec.num_layers))
        self.unneeded = (f"{model.path}.pooler.".lstrip("."), *_TRAINING)
        self.head = ClassificationHead(b, spec.head, spec.hidden_size, spec.num_labels) if spec.head else None

    def embed(self, step: StepInput) -> Tensor:
        """Return the normalized sum of word, position and token type embeddings, [T, hidden_size]."""
        x = self.words(step.input_ids) + self.positions(step.positions + self.spec.position_offset)
        if self.types is not None:
            types = step.token_types
            if types is None or self.spec.token_types == 1:
                types = torch.zeros_like(step.input_ids)
            x = x + self.types(types)
        return self.norm(x)
