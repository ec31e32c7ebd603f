"""BERT and related families: one encoder, with different names, positions and heads."""

from __future__ import annotations

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.encoders.spec import EncoderSpec, Gate, Head, Names
from octavo.models.hf_config import Config, num_labels, only, value_or, whole

_ACTIVATIONS: dict[str, Gate] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_DISTILBERT = Names(
    root="distilbert",
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    output_norm="output_layer_norm",
)


def bert(config: Config) -> EncoderSpec:
    """BERT (https://arxiv.org/abs/1810.04805) and MiniLM."""
    head = Head(dense="bert.pooler.dense", labels="classifier")
    return _encoder(config, Names(root="bert"), head)


def roberta(config: Config) -> EncoderSpec:
    """RoBERTa (https://arxiv.org/abs/1907.11692) and XLM-RoBERTa, whose positions begin after the padding's."""
    head = Head(dense="classifier.dense", labels="classifier.out_proj")
    offset = value_or(config, "pad_token_id", 1) + 1
    return _encoder(config, Names(root="roberta"), head, position_offset=offset)


def distilbert(config: Config) -> EncoderSpec:
    """DistilBERT (https://arxiv.org/abs/1910.01108), which has no token types."""
    only(config, "sinusoidal_pos_embds", False)
    renamed = {
        "hidden_size": whole(config, "dim", 768),
        "num_hidden_layers": whole(config, "n_layers", 6),
        "num_attention_heads": whole(config, "n_heads", 12),
        "intermediate_size": whole(config, "hidden_dim", 3072),
        "hidden_act": value_or(config, "activation", "gelu"),
        "type_vocab_size": 0,
    }
    head = Head(dense="pre_classifier", activation="relu", labels="classifier")
    return _encoder({**config, **renamed}, _DISTILBERT, head)


def _encoder(config: Config, names: Names, head: Head, position_offset: int = 0) -> EncoderSpec:
    """Return the spec from the common fields, with the defaults of Transformers' configurations.

    Raises:
        ConfigError: an unsupported feature.
        ModelFileError: an invalid field.
    """
    only(config, "position_embedding_type", "absolute")
    only(config, "is_decoder", False)
    hidden, heads = whole(config, "hidden_size", 768), whole(config, "num_attention_heads", 12)
    if hidden % heads:
        raise ModelFileError(f"The model's config has hidden_size={hidden}, not a multiple of its {heads} heads.")
    labels = num_labels(config)
    return EncoderSpec(
        hidden_size=hidden,
        num_layers=whole(config, "num_hidden_layers", 12),
        num_heads=heads,
        intermediate_size=whole(config, "intermediate_size", 3072),
        vocab_size=whole(config, "vocab_size", 30522),
        num_positions=whole(config, "max_position_embeddings", 512),
        token_types=value_or(config, "type_vocab_size", 2),
        norm_eps=float(value_or(config, "layer_norm_eps", 1e-12)),
        activation=activation(config, "hidden_act"),
        names=names,
        position_offset=position_offset,
        head=head if labels else None,
        num_labels=labels,
    )


def activation(config: Config, field: str) -> Gate:
    """Return the feed-forward's activation.

    Raises:
        ConfigError: it is not supported.
    """
    name = value_or(config, field, "gelu")
    if name not in _ACTIVATIONS:
        raise ConfigError(f"The model's config asks for {field}={name!r}; Octavo supports {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]
