"""ModernBERT (https://arxiv.org/abs/2412.13663): pre-norm, rotary positions, gated feed-forward, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from octavo.core.errors import ConfigError
from octavo.models.encoders.bert import activation
from octavo.models.encoders.encoder import ACTIVATIONS
from octavo.models.encoders.layered import LayeredEncoder, attend_rotated
from octavo.models.encoders.spec import Gate, SummaryKind
from octavo.models.hf_config import Config, num_labels, only, value_or, whole
from octavo.nn.build import Build
from octavo.nn.rope import Rope
from octavo.nn.rope_spec import RopeSpec
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.step import StepInput

ROOT = "model"
_LOCAL = "sliding_attention"
_THETAS = {"full_attention": 160_000.0, _LOCAL: 10_000.0}
_OLD_THETAS = {"full_attention": "global_rope_theta", _LOCAL: "local_rope_theta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernSpec:
    """The architecture of a ModernBERT model.

    Attributes:
        kinds: of each layer: "full_attention", or "sliding_attention", which attends to `reach` positions on each side.
        thetas: rotary base of each kind.
        biases: those of "attention", "mlp", "norm" and "head" that have biases.
        summary: as in `EncoderSpec`.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    kinds: tuple[str, ...]
    reach: int
    thetas: tuple[tuple[str, float], ...]
    biases: frozenset[str]
    activation: Gate
    head_activation: Gate
    summary: SummaryKind = "cls"
    num_labels: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def modernbert(config: Config) -> ModernSpec:
    """Return the spec, with the defaults of Transformers' configuration.

    Raises:
        ConfigError: an unsupported feature.
        ModelFileError: an invalid field.
    """
    kinds = _kinds(config)
    summary = value_or(config, "classifier_pooling", "cls")
    if summary not in ("cls", "mean"):
        raise ConfigError(f"The model's config has classifier_pooling={summary!r}; Octavo supports 'cls' and 'mean'.")
    named = {"attention": "attention_bias", "mlp": "mlp_bias", "norm": "norm_bias", "head": "classifier_bias"}
    return ModernSpec(
        hidden_size=whole(config, "hidden_size", 768),
        num_heads=whole(config, "num_attention_heads", 12),
        intermediate_size=whole(config, "intermediate_size", 1152),
        vocab_size=whole(config, "vocab_size", 50368),
        max_position=whole(config, "max_position_embeddings", 8192),
        norm_eps=float(value_or(config, "norm_eps", 1e-5)),
        kinds=kinds,
        reach=whole(config, "local_attention", 128) // 2,
        thetas=tuple((kind, _theta(config, kind)) for kind in _THETAS),
        biases=frozenset(part for part, field in named.items() if config.get(field)),
        activation=activation(config, "hidden_activation"),
        head_activation=activation(config, "classifier_activation"),
        summary=summary,
        num_labels=num_labels(config),
    )


def _kinds(config: Config) -> tuple[str, ...]:
    layers, every = whole(config, "num_hidden_layers", 22), whole(config, "global_attn_every_n_layers", 3)
    given = config.get("layer_types")
    kinds = given or [_LOCAL if layer % every else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_THETAS):
        raise ConfigError(f"The model's config has layer_types={given!r}; it takes {layers} of {', '.join(_THETAS)}.")
    return tuple(kinds)


def _theta(config: Config, kind: str) -> float:
    params = (config.get("rope_parameters") or {}).get(kind) or {}
    only(params, "rope_type", "default")
    only(config, "rope_scaling", None)
    return float(params.get("rope_theta") or value_or(config, _OLD_THETAS[kind], _THETAS[kind]))


class ModernLayer(nn.Module):
    """Attention and gated feed-forward, each after a norm; the first layer's input is normalized already."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, step: StepInput, /) -> Tensor: ...

    def __init__(self, b: Build, spec: ModernSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        size, inner = spec.hidden_size, spec.intermediate_size
        heads = Heads(spec.num_heads, spec.num_heads, spec.head_dim)
        self.head_dim = spec.head_dim
        self.reach = spec.reach if spec.kinds[layer] == _LOCAL else None
        self.activation = ACTIVATIONS[spec.activation]
        self.rope = rope
        attention, mlp, norm = (part in spec.biases for part in ("attention", "mlp", "norm"))
        self.attention_norm = b.layer_norm("attn_norm", size, spec.norm_eps, bias=norm) if layer else None
        self.qkv = b.at("attn").linear("Wqkv", inputs=size, outputs=3 * size, shard=heads, bias=attention)
        self.out = b.at("attn").linear("Wo", inputs=size, outputs=size, shard=ROW, bias=attention)
        self.mlp_norm = b.layer_norm("mlp_norm", size, spec.norm_eps, bias=norm)
        self.up = b.at("mlp").linear("Wi", inputs=size, outputs=2 * inner, shard=COL, bias=mlp)
        self.down = b.at("mlp").linear("Wo", inputs=inner, outputs=size, shard=ROW, bias=mlp)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        heads = self.qkv(normed).unflatten(-1, (-1, self.head_dim))
        x = self.out(attend_rotated(heads, self.rope, step, self.reach)).add_(x)
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up).add_(x)


class ModernHead(nn.Module):
    """Computes labels from a pooled state."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, /) -> Tensor: ...

    def __init__(self, b: Build, spec: ModernSpec) -> None:
        super().__init__()
        size, norm, bias = spec.hidden_size, "norm" in spec.biases, "head" in spec.biases
        self.activation = ACTIVATIONS[spec.head_activation]
        self.dense = b.at("head").linear("dense", inputs=size, outputs=size, shard=NONE, bias=bias)
        self.norm = b.at("head").layer_norm("norm", size, spec.norm_eps, bias=norm)
        self.labels = b.linear("classifier", inputs=size, outputs=spec.num_labels, shard=NONE, bias=True)

    def forward(self, pooled: Tensor) -> Tensor:
        """Return the labels' logits: [R, H] to [R, labels]."""
        return self.labels(self.norm(self.activation(self.dense(pooled))))


class ModernEncoder(LayeredEncoder):
    """A ModernBERT model with the interface of `EncoderModel`.

    Attributes:
        unneeded: prefixes of tensor names that checkpoints have in addition.
    """

    def __init__(self, b: Build, spec: ModernSpec, root: str) -> None:
        """
        Args:
            root: prefix of the encoder's names in this checkpoint: `ROOT`, or "".
        """
        super().__init__(b.dtype)
        self.spec = spec
        self.unneeded = ("decoder.",) if spec.num_labels else ("decoder.", "head.")
        model = b.at(root)
        ropes = {
            kind: b.rope(RopeSpec(spec.head_dim, spec.max_position, theta))
            for kind, theta in spec.thetas
            if kind in spec.kinds
        }
        self.ropes = nn.ModuleList(ropes.values())
        norm = "norm" in spec.biases
        self.words = model.at("embeddings").embedding("tok_embeddings", spec.vocab_size, spec.hidden_size)
        self.norm = model.at("embeddings").layer_norm("norm", spec.hidden_size, spec.norm_eps, bias=norm)
        self.layers = nn.ModuleList(
            ModernLayer(model.at("layers", i), spec, i, ropes[kind]) for i, kind in enumerate(spec.kinds)
        )
        self.final_norm = model.layer_norm("final_norm", spec.hidden_size, spec.norm_eps, bias=norm)
        self.head = ModernHead(b, spec) if spec.num_labels else None

    def embed(self, step: StepInput) -> Tensor:
        """Return the normalized word embeddings, [T, hidden_size]."""
        return self.norm(self.words(step.input_ids))

    def final(self, hidden: Tensor) -> Tensor:
        return self.final_norm(hidden)
