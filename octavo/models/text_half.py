"""Text halves of models that also read images or sound: decoders of other families, nested in their configurations.

Without images, positions along several axes (M-RoPE) are equal, so that they are plain rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import ConfigError
from octavo.hub.text_config import text_config
from octavo.models.hf_config import Config, value_or
from octavo.models.text_defaults import TEXT_DEFAULTS

_BY_TYPE = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone4_5_text": "Exaone4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_asr_text": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""`model_type` of a text model -> its architecture."""
_TIED = "tie_word_embeddings"


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
    defaults = TEXT_DEFAULTS.get(kind, {})
    return {**defaults, **text, **_plain_rope(text), **_tied(config, text, defaults), "architectures": [name]}


def _tied(config: Config, text: Config, defaults: Config) -> Config:
    """Return whether the head is tied, if that is stated. Transformers 5 states it for the whole model, and writes the
    default in the text model's configuration; earlier versions state it there."""
    stated = [one[_TIED] for one in (config, text) if one.get(_TIED) is not None]
    default = bool(defaults.get(_TIED, False))
    own = value_or(text, _TIED, default)
    return {_TIED: own if own != default else stated[0]} if stated else {}


def _plain_rope(text: Config) -> Config:
    """Return the rope fields with one axis in place of several."""
    fields = {name: dict(text[name]) for name in ("rope_scaling", "rope_parameters") if text.get(name)}
    for params in fields.values():
        for key in ("type", "rope_type"):
            if params.get(key) == "mrope":
                params[key] = "default"
    return fields
