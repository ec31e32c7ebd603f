"""Nomic's BERT (https://arxiv.org/abs/2402.01613): post-norm, rotary positions, gated feed-forward, no biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.core.errors import ConfigError
from octavo.models.encoders.layered import LayeredEncoder, attend_rotated
from octavo.models.encoders.spec import SummaryKind
from octavo.models.hf_config import Config, num_labels, only, value_or, whole
from octavo.nn.build import Build
from octavo.nn.rope import Rope
from octavo.nn.rope_spec import RopeSpec
from octavo.nn.shard import COL, ROW, Heads
from octavo.nn.step import StepInput

ROOT = "nomic_bert"
_PUBLISHED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
"""Fields of Transformers' configuration -> their names in the authors' own."""
_ONLY = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "num_experts": 0,
}
"""Variations in the authors' configuration that Octavo does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NomicSpec:
    """The architecture of a Nomic model.

    Attributes:
        token_types: rows of the token type table.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    token_types: int
    norm_eps: float
    theta: float
    num_labels: int = 0

    @property
    def summary(self) -> SummaryKind:
        """Pooling: the hidden states that represent the prompt."""
        return "mean"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def nomic(config: Config) -> NomicSpec:
    """Return the spec, with the defaults of Transformers' configuration.

    Raises:
        ConfigError: an unsupported feature.
        ModelFileError: an invalid field.
    """
    if num_labels(config):
        raise ConfigError("The model is a NomicBert with a classification head; Octavo has its embeddings only.")
    for field, supported in _ONLY.items():
        only(config, field, supported)
    given = {ours: config[theirs] for ours, theirs in _PUBLISHED.items() if config.get(theirs) is not None}
    merged: dict[str, Any] = {**given, **config}
    if merged.get("hidden_act") not in (None, "silu", "swiglu"):
        only(merged, "hidden_act", "silu")
    rope = value_or(config, "rope_parameters", {})
    only(rope, "rope_type", "default")
    only(config, "rotary_scaling_factor", None)
    return NomicSpec(
        hidden_size=whole(merged, "hidden_size", 768),
        num_layers=whole(merged, "num_hidden_layers", 12),
        num_heads=whole(merged, "num_attention_heads", 12),
        intermediate_size=whole(merged, "intermediate_size", 3072),
        vocab_size=whole(merged, "vocab_size", 30528),
        max_position=whole(merged, "max_position_embeddings", 2048),
        token_types=whole(merged, "type_vocab_size", 2),
        norm_eps=float(value_or(merged, "layer_norm_eps", 1e-12)),
        theta=float(rope.get("rope_theta") or value_or(config, "rotary_emb_base", 1000.0)),
    )


class NomicLayer(nn.Module):
    """Attention and gated feed-forward, each followed by its residual sum and a norm."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, step: StepInput, /) -> Tensor: ...

    def __init__(self, b: Build, spec: NomicSpec, rope: Rope) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        heads = Heads(spec.num_heads, spec.num_heads, spec.head_dim)
        self.head_dim = spec.head_dim
        self.rope = rope
        self.qkv = b.at("attn").linear("Wqkv", inputs=size, outputs=3 * size, shard=heads)
        self.out = b.at("attn").linear("out_proj", inputs=size, outputs=size, shard=ROW)
        self.attention_norm = b.layer_norm("norm1", size, spec.norm_eps)
        self.gate_up = b.at("mlp").linear("fc12", "fc11", inputs=size, outputs=inner, shard=COL)
        self.down = b.at("mlp").linear("fc2", inputs=inner, outputs=size, shard=ROW)
        self.output_norm = b.layer_norm("norm2", size, spec.norm_eps)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        x = self.attention_norm(self.out(attend_rotated(heads, self.rope, step)).add_(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.output_norm(self.down(F.silu(gate) * up).add_(x))


class NomicEncoder(LayeredEncoder):
    """A Nomic model with the interface of `EncoderModel`.

    Attributes:
        unneeded: prefixes of tensor names that checkpoints have in addition.
    """

    unneeded = ("cls.", "pooler.", f"{ROOT}.pooler.")

    def __init__(self, b: Build, spec: NomicSpec, root: str) -> None:
        """
        Args:
            root: prefix of the encoder's names in this checkpoint: `ROOT`, or "".
        """
        super().__init__(b.dtype)
        self.spec = spec
        self.head = None
        model = b.at(root)
        embeddings = model.at("embeddings")
        self.words = embeddings.embedding("word_embeddings", spec.vocab_size, spec.hidden_size)
        self.types = embeddings.embedding("token_type_embeddings", spec.token_types, spec.hidden_size)
        self.norm = model.layer_norm("emb_ln", spec.hidden_size, spec.norm_eps)
        self.rope = b.rope(RopeSpec(spec.head_dim, spec.max_position, spec.theta))
        layers = model.at("encoder", "layers")
        self.layers = nn.ModuleList(NomicLayer(layers.at(i), spec, self.rope) for i in range(spec.num_layers))

    def embed(self, step: StepInput) -> Tensor:
        """Return the normalized sum of word and token type embeddings, [T, hidden_size]."""
        types = step.token_types
        if types is None or self.spec.token_types == 1:
            types = torch.zeros_like(step.input_ids)
        return self.norm(self.words(step.input_ids) + self.types(types))
