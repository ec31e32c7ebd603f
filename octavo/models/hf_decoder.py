"""Reading the fields of Hugging Face configurations that families of decoders share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.feed_forwards.spec import FeedForwardSpec, MlpSpec
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.hf_rope import rope_spec
from octavo.models.spec import DecoderSpec, NormSpec
from octavo.nn.rope_spec import RopeSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def decoder_spec(
    config: Config,
    *,
    windows: Sequence[int | None] | None = None,
    head_dim: int | None = None,
    rope: RopeSpec | None = None,
    norm: NormSpec | None = None,
    mlp: FeedForwardSpec | None = None,
    mlps: Sequence[FeedForwardSpec | None] = (),
    tied: bool = False,
    **parts: Any,
) -> DecoderSpec:
    """Return the spec from the fields that most families share; the caller adds the rest.

    Args:
        windows: each layer's; None for full attention in all layers.
        head_dim: the family's default; None for hidden_size / num_attention_heads.
        rope, norm, mlp: those of all layers; None reads Llama's fields.
        mlps: each layer's feed-forward, if they differ.
        tied: the family's default.
        parts: other fields of `DecoderSpec`.

    Raises:
        ModelFileError: a field is missing, or two contradict each other.
        ConfigError: a feature is not supported.
    """
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFileError(
            f"The model's config has num_attention_heads={heads}, not a multiple of num_key_value_heads={kv_heads}."
        )
    head_dim = head_size(config, head_dim)
    layers = whole(config, "num_hidden_layers")
    if "head" in parts.get("biases", ()):
        only(config, "tie_word_embeddings", False)
    return DecoderSpec(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=whole(config, "vocab_size"),
        norm=norm or rms_norm(config),
        rope=rope or rope_spec(config, head_dim),
        windows=tuple(windows or [None] * layers),
        mlps=tuple(mlps) or (mlp or mlp_spec(config, activation(config)),) * layers,
        tied=bool(value_or(config, "tie_word_embeddings", tied)),
        **parts,
    )


def mlp_spec(config: Config, activation: str, *, gated: bool = True) -> MlpSpec:
    """Return a dense feed-forward of the configuration's `intermediate_size`."""
    return MlpSpec(whole(config, "intermediate_size"), activation, gated)


def rms_norm(config: Config, *, default: float = 1e-6, offset: float = 0.0, scaled: bool = True) -> NormSpec:
    """Return an RMSNorm with the configuration's epsilon."""
    return NormSpec(float(value_or(config, "rms_norm_eps", default)), offset=offset, scaled=scaled)


def layer_norm(config: Config, name: str = "layer_norm_eps", *, bias: bool = True) -> NormSpec:
    """Return a LayerNorm with the epsilon of this field."""
    return NormSpec(float(value_or(config, name, 1e-5)), "layer", bias=bias)


def activation(config: Config, name: str = "hidden_act", default: str = "silu") -> str:
    """Return the activation that a field names, by its name in `nn/ops/activation.py`.

    Raises:
        ConfigError: it is not supported.
    """
    stated = value_or(config, name, default)
    if stated not in _ACTIVATIONS:
        raise ConfigError(
            f"The model's config asks for {name}={stated!r}; Octavo supports {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[stated]


def layer_windows(config: Config) -> list[int | None]:
    """Return each layer's window: by `layer_types` if given, else for the layers from `max_window_layers` on.

    Raises:
        ConfigError: a layer type is not supported.
        ModelFileError: `layer_types` has the wrong length.
    """
    layers = whole(config, "num_hidden_layers")
    window = whole(config, "sliding_window", 4096) if config.get("use_sliding_window") else None
    if config.get("layer_types") is None:
        first = value_or(config, "max_window_layers", 28)
        return [window if i >= first else None for i in range(layers)]
    return [window if kind == SLIDING else None for kind in layer_types(config, 0)]


SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(config: Config, pattern: int, default: Sequence[str] = ()) -> list[str]:
    """Return each layer's type.

    Args:
        pattern: every layer of this number has full attention if the configuration has no `layer_types`; 0 for all.
        default: the types in that case, if they have no such pattern.

    Raises:
        ConfigError: a layer type is not supported.
        ModelFileError: `layer_types` has the wrong length.
    """
    layers, types = whole(config, "num_hidden_layers"), config.get("layer_types")
    if types is None and default:
        return list(default)
    if types is None:
        return [SLIDING if pattern and (i + 1) % pattern else FULL for i in range(layers)]
    if len(types) != layers:
        raise ModelFileError(f"The model's config lists {len(types)} layer_types for {layers} layers.")
    unknown = sorted(set(types) - {SLIDING, FULL})
    if unknown:
        raise ConfigError(
            f"The model's config has layers of type {', '.join(unknown)}; Octavo supports {FULL}, {SLIDING}."
        )
    return list(types)


def sliding_windows(types: Sequence[str], window: int | None) -> list[int | None]:
    """Return each layer's window, by its type."""
    return [window if kind == SLIDING else None for kind in types]


def bias_set(
    config: Config,
    *,
    qkv: str = "attention_bias",
    o: str = "attention_bias",
    mlp: str = "mlp_bias",
    default: bool = False,
) -> frozenset[str]:
    """Return the biases that these fields switch on; "" for one that the family lacks."""
    fields = {"qkv": qkv, "o": o, "mlp": mlp}
    return frozenset(part for part, name in fields.items() if name and value_or(config, name, default))


def head_size(config: Config, default: int | None = None) -> int:
    """Return the channels of a head; by default hidden_size / num_attention_heads."""
    return whole(config, "head_dim", default or whole(config, "hidden_size") // whole(config, "num_attention_heads"))
