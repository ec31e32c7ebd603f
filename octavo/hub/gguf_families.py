"""Architectures of GGUF files: the Hugging Face class of each, and the fields that only its family has.

Keys, defaults and layouts are those of llama.cpp (`conversion/` and `src/models/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub import gguf_experts as experts
from octavo.hub import gguf_recurrent as recurrent
from octavo.hub.gguf_keys import Keys
from octavo.hub.gguf_latent import minicpm3

Fields = Callable[[Keys], dict[str, Any]]
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


def _nothing(keys: Keys) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        name: the Hugging Face class.
        model_type: its name in config.json.
        eps: the field of the norms' epsilon; None if the family has no such field. Those that begin with "rms" are of
            RMSNorm.
        bias: the field that gives queries, keys and values biases.
        paired: the converter stores the rows of q and k in rotary pairs: channel i beside i + half. Families whose
            original checkpoints have them in pairs are stored as they are.
        fields: those that only this family has.
        experts: files may have experts.
        latent: latent attention, so that heads have several sizes.
    """

    name: str
    model_type: str
    eps: str | None = "rms_norm_eps"
    bias: str = "attention_bias"
    paired: bool = False
    fields: Fields = _nothing
    experts: bool = False
    latent: bool = False


def _windows(keys: Keys, pattern: int) -> dict[str, Any]:
    """Return the type of each layer.

    Args:
        pattern: every layer of this number has full attention, unless the file says otherwise; with 0 none.
    """
    given = keys.each("attention.sliding_window_pattern", pattern)
    layers = keys.need("block_count")
    local = given if isinstance(given, list) else [not given or (layer + 1) % given > 0 for layer in range(layers)]
    if not keys.get("attention.sliding_window"):
        local = [False] * layers
    return {"layer_types": ["sliding_attention" if window else "full_attention" for window in local]}


def _gemma_scale(keys: Keys, layers_27b: int) -> dict[str, Any]:
    """Return the scale of scores, which differs in one size, and is not in the file."""
    if keys.need("block_count") == layers_27b:
        return {"query_pre_attn_scalar": keys.need("embedding_length") // keys.need("attention.head_count")}
    return {"query_pre_attn_scalar": keys.head_dim}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        **_windows(keys, 2),
        **_gemma_scale(keys, _GEMMA2_27B_LAYERS),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    return {
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        **_windows(keys, 6),
        **_gemma_scale(keys, _GEMMA3_27B_LAYERS),
    }


def _granite(keys: Keys) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "attention_multiplier": keys.get("attention.scale") or keys.head_dim**-0.5,
        "logits_scaling": keys.need("logit_scale"),
    }


def _granite_moe(keys: Keys) -> dict[str, Any]:
    """Models with a shared feed-forward are stored as those without."""
    shared = keys.get("expert_shared_feed_forward_length", 0)
    named = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"} if shared else {}
    return _granite(keys) | experts.counts(keys) | named | {"shared_intermediate_size": shared}


def _granite_hybrid(keys: Keys) -> dict[str, Any]:
    return _granite(keys) | recurrent.granite_hybrid(keys)


def _minicpm(keys: Keys) -> dict[str, Any]:
    """Files of old converters lack the constants, which were the same for all models then."""
    hidden, layers = keys.need("embedding_length"), keys.need("block_count")
    return {
        "scale_emb": keys.get("embedding_scale", 12.0),
        "scale_depth": keys.get("residual_scale", 1.4 / layers**0.5) * layers**0.5,
        "dim_model_base": hidden / keys.get("logit_scale", hidden / 256),
    }


def _cohere(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.get("logit_scale", 0.0625), "use_qk_norm": keys.has("blk.0.attn_q_norm.weight")}


def _cohere2(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.need("logit_scale"), **_windows(keys, 4)}


def _exaone4(keys: Keys) -> dict[str, Any]:
    return _windows(keys, 4) if keys.get("attention.sliding_window") else {"sliding_window": None}


def _exaone_moe(keys: Keys) -> dict[str, Any]:
    fields = experts.with_prediction(keys)
    return {
        **fields,
        "num_shared_experts": fields["n_shared_experts"],
        "layer_types": _windows(keys, 4)["layer_types"][: fields["num_hidden_layers"]],
    }


def _afmoe(keys: Keys) -> dict[str, Any]:
    return {**experts.afmoe(keys), **_windows(keys, 4)}


def _apertus(keys: Keys) -> dict[str, Any]:
    """The activation's parameters are not tensors, but lists of one number for each layer."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    lists = [keys.file.metadata.get(f"xielu.{name}", []) for name in names]
    layers = keys.need("block_count")
    if any(len(numbers) != layers for numbers in lists):
        raise ModelFileError(
            f"{keys.file.path} lacks parameters of its activation: xielu.alpha_p, alpha_n, beta and eps for each of "
            f"{layers} layers."
        )
    scaled = keys.has("rope_freqs.weight") or keys.get("rope.scaling.type", "none") != "none"
    rope = {} if scaled else {"rope_scaling": {"rope_type": "default"}}  # the family's default is another
    return {"xielu_parameters": [list(curve) for curve in zip(*lists, strict=True)], **rope}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 3 is stored as an OLMo 2 with windows."""
    if not keys.get("attention.sliding_window"):
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **_windows(keys, 4)}


def _falcon(keys: Keys) -> dict[str, Any]:
    two_norms = keys.has("blk.0.attn_norm_2.weight")
    kv_heads = keys.get("attention.head_count_kv", keys.need("attention.head_count"))
    return {
        "new_decoder_architecture": two_norms or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": keys.need("feed_forward_length"),
    }


def _gpt(keys: Keys) -> dict[str, Any]:
    return {
        "n_embd": keys.need("embedding_length"),
        "n_inner": keys.need("feed_forward_length"),
        "n_layer": keys.need("block_count"),
        "n_head": keys.need("attention.head_count"),
        "n_positions": keys.need("context_length"),
    }


def _bloom(keys: Keys) -> dict[str, Any]:
    return {
        "n_layer": keys.need("block_count"),
        "n_head": keys.need("attention.head_count"),
        "seq_length": keys.need("context_length"),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    return {"use_parallel_residual": keys.get("use_parallel_residual", True)}


def _olmo(keys: Keys) -> dict[str, Any]:
    return {"clip_qkv": keys.get("attention.clamp_kqv")}


def _seed_oss(keys: Keys) -> dict[str, Any]:
    return {"attention_out_bias": keys.has("blk.0.attn_output.bias")}


def _bert(keys: Keys) -> dict[str, Any]:
    """BERT, RoBERTa, XLM-RoBERTa and DistilBERT are stored alike; position tables begin at the first position."""
    tensors = keys.file.tensors
    types, positions = tensors.get("token_types.weight"), tensors.get("position_embd.weight")
    sizes = {
        "type_vocab_size": types.shape[0] if types else 0,
        "max_position_embeddings": positions.shape[0] if positions else keys.need("context_length"),
    }
    labels = tensors.get("cls.output.weight")
    if labels is None and not keys.has("cls.weight"):
        return sizes
    if labels is None or not keys.has("cls.weight"):
        raise ModelFileError(
            f"{keys.file.path} holds a classifier with one of the two layers that RoBERTa's have (cls.weight, "
            "cls.output.weight); llama.cpp's converter leaves out one of BERT's. Use the model's safetensors "
            "checkpoint instead."
        )
    names = keys.each("classifier.output_labels") or [f"LABEL_{i}" for i in range(labels.shape[0])]
    return {
        **sizes,
        "architectures": ["RobertaForSequenceClassification"],
        "model_type": "roberta",
        "id2label": {str(i): name for i, name in enumerate(names)},
        "pad_token_id": -1,  # RoBERTa's positions begin after it
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", paired=True, fields=experts.mixtral, experts=True),
    "mistral": Family("MistralForCausalLM", "mistral"),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", bias="qkv_bias", fields=experts.qwen2, experts=True),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", fields=experts.qwen3, experts=True),
    "qwen3vlmoe": Family("Qwen3MoeForCausalLM", "qwen3_moe", fields=experts.qwen3, experts=True),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", fields=recurrent.qwen3_5),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", fields=recurrent.qwen3_5_moe, experts=True),
    "qwen3next": Family("Qwen3NextForCausalLM", "qwen3_next", fields=recurrent.qwen3_next, experts=True),
    "afmoe": Family("AfmoeForCausalLM", "afmoe", fields=_afmoe, experts=True),
    "apertus": Family("ApertusForCausalLM", "apertus", fields=_apertus),
    "arcee": Family("ArceeForCausalLM", "arcee", paired=True),
    "bert": Family("BertModel", "bert", "layer_norm_eps", fields=_bert),
    "bloom": Family("BloomForCausalLM", "bloom", "layer_norm_epsilon", fields=_bloom),
    "chatglm": Family("GlmForCausalLM", "glm"),
    "cohere2": Family("Cohere2ForCausalLM", "cohere2", "layer_norm_eps", fields=_cohere2),
    "command-r": Family("CohereForCausalLM", "cohere", "layer_norm_eps", fields=_cohere),
    "deepseek2": Family("DeepseekV2ForCausalLM", "deepseek_v2", fields=experts.deepseek, experts=True, latent=True),
    "dots1": Family("Dots1ForCausalLM", "dots1", fields=experts.after_dense, experts=True),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", bias="use_bias"),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", bias="use_bias", fields=experts.ernie, experts=True
    ),
    "exaone": Family("ExaoneForCausalLM", "exaone", "layer_norm_epsilon"),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", fields=_exaone4),
    "exaone-moe": Family("ExaoneMoeForCausalLM", "exaone_moe", fields=_exaone_moe, experts=True),
    "falcon": Family("FalconForCausalLM", "falcon", "layer_norm_epsilon", "bias", fields=_falcon),
    "gemma": Family("GemmaForCausalLM", "gemma"),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", fields=_gemma2),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", fields=_gemma3),
    "glm4": Family("Glm4ForCausalLM", "glm4"),
    "glm4moe": Family("Glm4MoeForCausalLM", "glm4_moe", fields=experts.glm4, experts=True),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", fields=experts.gpt_oss, experts=True),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", "layer_norm_epsilon", fields=_gpt),
    "gptneox": Family("GPTNeoXForCausalLM", "gpt_neox", "layer_norm_eps", fields=_gpt_neox),
    "granite": Family("GraniteForCausalLM", "granite", paired=True, fields=_granite),
    "granitemoe": Family("GraniteMoeForCausalLM", "granitemoe", paired=True, fields=_granite_moe, experts=True),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", paired=True, fields=_granite_hybrid, experts=True
    ),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": Family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", fields=experts.hunyuan, experts=True),
    "internlm2": Family("InternLM2ForCausalLM", "internlm2", bias="bias", paired=True),
    "jais2": Family("Jais2ForCausalLM", "jais2", "layer_norm_eps"),
    "jamba": Family("JambaForCausalLM", "jamba", fields=recurrent.jamba, experts=True),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", "norm_eps", fields=recurrent.lfm2),
    "lfm2moe": Family("Lfm2MoeForCausalLM", "lfm2_moe", "norm_eps", fields=recurrent.lfm2_moe, experts=True),
    "mamba": Family("MambaForCausalLM", "mamba", "layer_norm_epsilon", fields=recurrent.mamba),
    "mamba2": Family("Mamba2ForCausalLM", "mamba2", "layer_norm_epsilon", fields=recurrent.mamba2),
    "llama4": Family("Llama4ForCausalLM", "llama4_text", fields=experts.llama4, experts=True),
    "minicpm": Family("MiniCPMForCausalLM", "minicpm", paired=True, fields=_minicpm),
    "minicpm3": Family("MiniCPM3ForCausalLM", "minicpm3", fields=minicpm3, latent=True),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", "minimax_m2", fields=experts.minimax, experts=True),
    "nemotron": Family("NemotronForCausalLM", "nemotron", "norm_eps"),
    "nemotron_h": Family("NemotronHForCausalLM", "nemotron_h", "layer_norm_epsilon", fields=recurrent.nemotron_h),
    "nemotron_h_moe": Family(
        "NemotronHForCausalLM", "nemotron_h", "layer_norm_epsilon", fields=recurrent.nemotron_h, experts=True
    ),
    "olmo": Family("OlmoForCausalLM", "olmo", None, paired=True, fields=_olmo),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", fields=_olmo2),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", fields=experts.olmoe, experts=True),
    "phi2": Family("PhiForCausalLM", "phi", "layer_norm_eps"),
    "phi3": Family("Phi3ForCausalLM", "phi3"),
    "phimoe": Family("PhimoeForCausalLM", "phimoe", fields=experts.phi, experts=True),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", fields=_seed_oss),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", paired=True),
    "stablelm": Family("StableLmForCausalLM", "stablelm", "layer_norm_eps", "use_qkv_bias", fields=_stablelm),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2", "norm_epsilon", "use_bias"),
}
"""GGUF architecture -> its family."""


def is_paired(arch: object) -> bool:
    """Return whether files of an architecture have the rows of q and k in rotary pairs (`Family.paired`)."""
    return arch in FAMILIES and FAMILIES[str(arch)].paired


def with_experts() -> list[str]:
    """Return the architectures whose files may have experts."""
    return [arch for arch, family in FAMILIES.items() if family.experts]
