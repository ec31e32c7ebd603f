"""Configurations of encoders: what is refused, and how."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import ConfigError
from octavo.models.encoders.registry import encoder_spec, is_encoder
from octavo.models.spec import DecoderSpec


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("BertModel", {"hidden_act": "silu"}, "hidden_act='silu'; Octavo supports gelu, gelu_new,.*relu"),
        ("ModernBertModel", {"hidden_activation": "silu"}, "hidden_activation='silu'; Octavo supports gelu, gelu_new"),
        ("BertModel", {"is_decoder": True}, "is_decoder=True"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("DistilBertModel", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds=True"),
        ("NomicBertModel", {"prenorm": True}, "prenorm=True"),
    ],
)
def test_other_arithmetic_is_refused_with_what_there_is(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder_spec({"architectures": [architecture], **fields})


DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 256,
}


def test_embedding_gemma_as_published() -> None:
    types = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    published = {
        "_sliding_window_pattern": 6,
        "architectures": ["Gemma3TextModel"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "layer_types": types,
        "max_position_embeddings": 2048,
        "model_type": "gemma3_text",
        "num_attention_heads": 3,
        "num_hidden_layers": 24,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": True,
        "vocab_size": 262144,
    }
    assert is_encoder(published)
    spec = encoder_spec(published)
    assert isinstance(spec, DecoderSpec)
    assert spec.bidirectional
    assert spec.windows == tuple(257 if kind == "sliding_attention" else None for kind in types)
    assert (spec.rope_of(0).theta, spec.rope_of(5).theta) == (1e4, 1e6)
    assert (spec.scale, spec.summary, spec.max_position) == (256**-0.5, "mean", 2048)
    causal = {**published, "use_bidirectional_attention": False}
    assert not is_encoder(causal)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("LlamaModel", {"use_bidirectional_attention": True}, "LlamaModel does not have; .*Gemma3TextModel"),
        ("MistralForCausalLM", {"is_causal": False, "sliding_window": 8}, "is_causal=False and sliding windows"),
        ("Gemma3TextModel", {"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0}, "a soft cap"),
        ("BloomModel", {"is_causal": False, "n_head": 4}, "linear biases"),
        ("OlmoeForCausalLM", {"is_causal": False}, "experts"),
    ],
)
def test_what_bidirectional_decoders_lack(architecture: str, fields: dict[str, Any], message: str) -> None:
    stated = {**DECODER, "architectures": [architecture], **fields}
    assert is_encoder(stated)
    with pytest.raises(ConfigError, match=message):
        encoder_spec(stated)
