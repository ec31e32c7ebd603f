"""Text halves of models that also read images or sound: decoders of other families, nested in their configurations.

Without images, positions along several axes (M-RoPE) are equal, so that they are plain rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.text_config import text_config
from octavo.models.hf_config import Config

_BY_TYPE = {
    "gemma3_text": "Gemma3ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""`model_type` of a text model -> its architecture."""
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8},
}
"""Defaults of Transformers' configurations, which published nested configurations leave out (LLaVA 1.5, Gemma 3)."""


def text_half(config: Config, known: Mapping[str, Any]) -> Config:
    """Return the configuration of a model's text half, as that of a checkpoint of its own.

    Args:
        known: architectures that text halves may have.

    Raises:
        ConfigError: the text half has none of them.
    """
    text = text_config(config)
    kind = str(text.get("model_type") or "")
    stated = str((text.get("architectures") or [""])[0])
    name = _BY_TYPE.get(kind, stated)  # newer files repeat the whole model's architecture in the text model's
    if name not in known:
        has = ", ".join(sorted(set(_BY_TYPE.values())))
        raise ConfigError(
            f"{config['architectures'][0]}: its text half is {stated or kind or 'unnamed'}. Octavo has those of {has}."
        )
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    return {**_DEFAULTS.get(kind, {}), **tied, **text, **_plain_rope(text), "architectures": [name]}


def _plain_rope(text: Config) -> Config:
    """Return the rope fields with one axis in place of several."""
    fields = {name: dict(text[name]) for name in ("rope_scaling", "rope_parameters") if text.get(name)}
    for params in fields.values():
        for key in ("type", "rope_type"):
            if params.get(key) == "mrope":
                params[key] = "default"
    return fields
