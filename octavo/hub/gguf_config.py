"""GGUF metadata in Hugging Face's vocabulary, so that one model builder serves both kinds of checkpoint.

Keys: ggml's docs/gguf.md. Architectures: `gguf_families.py`.
"""

from __future__ import annotations

from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_families import FAMILIES, Family, with_experts
from octavo.hub.gguf_file import GGUFFile
from octavo.hub.gguf_keys import Keys, shortest
from octavo.hub.rope_factors import llama3_scaling, longrope_scaling

# general.file_type -> dtype. A quantized file does not state its original dtype; bfloat16 is what models of these
# families were trained in.
_FILE_DTYPES = {0: "float32", 1: "float16"}
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Keys of sampling defaults -> their names in generation_config.json."""
ENDS = {"<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_turn>", "<end_of_utterance>"} | {
    f"<|{name}|>"
    for name in ("eot_id", "eom_id", "im_end", "end", "return", "call", "calls", "flush", "endoftext", "end_of_text")
}
"""Texts of tokens that end an answer in any model that has them, as in llama.cpp (`src/llama-vocab.cpp`)."""
_CALLS = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""Where all of these end an answer, <|end|> only ends a part of it (gpt-oss, Solar)."""
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent of config.json.

    Raises:
        ModelFileError: the architecture is unknown (the message lists the known ones), a key or tensor is missing, or
            the file is one part of several.
    """
    keys = Keys(file)
    if file.metadata.get("split.count", 1) > 1:
        raise ModelFileError(
            f"{file.path} is one of {file.metadata['split.count']} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUTPUT.gguf"
        )
    family = _family(keys)
    _check_decoder(keys)
    tokens = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    numbers = {name: file.metadata.get(f"tokenizer.ggml.{short}_token_id") for name, short in tokens.items()}
    return {
        **_identity(file, family),
        **_shape(keys, family),
        **_rope(keys),
        **_attention(keys, family),
        **{name: number for name, number in numbers.items() if number is not None},
        **family.fields(keys),
    }


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent of generation_config.json: end-of-turn tokens and sampling defaults."""
    config: dict[str, Any] = {}
    if ends := _ends(file):
        config["eos_token_id"] = ends
    for key, name in SAMPLING.items():
        value = file.metadata.get(key)
        if value is not None:
            config[name] = shortest(value) if isinstance(value, float) else value
    return config


def _ends(file: GGUFFile) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and those known by their text, since the
    converter names only one of them (Gemma's `<eos>`, Phi's `<|endoftext|>`), and not the one that ends a turn."""
    named = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found = {text: number for number, text in enumerate(file.metadata.get("tokenizer.ggml.tokens", [])) if text in ENDS}
    if any(calls <= found.keys() for calls in _CALLS):
        found.pop("<|end|>", None)
    return list(dict.fromkeys(number for number in (*named, *found.values()) if number is not None))


def _family(keys: Keys) -> Family:
    path = keys.file.path
    if keys.arch not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelFileError(
            f"{path} holds a model of architecture {keys.arch or '(none)'!r}; known in GGUF files are: {known}. "
            "Serve a model of one of these."
        )
    family = FAMILIES[keys.arch]
    if keys.get("expert_count", 0) > 0 and not family.experts:
        raise ModelFileError(
            f"{path} holds a mixture of experts ({keys.arch}.expert_count = {keys.get('expert_count')}); this "
            f"architecture is known without experts, and with them are: {', '.join(with_experts())}."
        )
    return family


def _check_decoder(keys: Keys) -> None:
    """Refuse decoders that attend in both directions."""
    if keys.arch != "bert" and keys.get("attention.causal", True) is False:
        raise ModelFileError(
            f"{keys.file.path}: {keys.arch}.attention.causal is False, so tokens attend in both directions; of this "
            "architecture only causal models are supported. Serve another model."
        )


def _identity(file: GGUFFile, family: Family) -> dict[str, Any]:
    file_type = file.metadata.get("general.file_type")
    return {
        "architectures": [family.name],
        "model_type": family.model_type,
        "torch_dtype": _FILE_DTYPES.get(file_type, "bfloat16") if file_type is not None else "bfloat16",
    }


def _shape(keys: Keys, family: Family) -> dict[str, Any]:
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{keys.file.path} lacks a token_embd.weight of two dimensions: it is not a whole model.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.most("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "max_position_embeddings": keys.need("context_length"),
        **({family.eps: _epsilon(keys, family.eps)} if family.eps else {}),
        "tie_word_embeddings": not keys.has("output.weight"),
    }


def _epsilon(keys: Keys, field: str) -> float:
    """Return the norms' epsilon; converters have stored that of some families under the other kind of norm."""
    rms, layer = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    first, second = (rms, layer) if field.startswith("rms") else (layer, rms)
    value: float = keys.need(first) if keys.get(second) is None else keys.get(first, keys.get(second))
    return value


def _attention(keys: Keys, family: Family) -> dict[str, Any]:
    heads, head_dim = keys.most("attention.head_count"), keys.head_dim
    value_dim, rotary_dim = keys.get("attention.value_length", head_dim), _rotary_dim(keys)
    unlike = value_dim != head_dim and not family.latent
    if unlike or (family.paired and rotary_dim != head_dim):
        raise ModelFileError(
            f"{keys.file.path}: keys of {head_dim}, values of {value_dim} and rotary embedding of {rotary_dim} "
            "channels; only equal ones are supported."
        )
    window = keys.get("attention.sliding_window") or None
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.most("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        family.bias: keys.arch == "qwen2" or keys.has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "mlp_bias": keys.has("blk.0.ffn_down.bias"),
    }


def _rotary_dim(keys: Keys) -> int:
    size: int = keys.get("rope.dimension_count", keys.head_dim)
    return size


def _rope(keys: Keys) -> dict[str, Any]:
    theta = keys.get("rope.freq_base", 10000.0)
    return {
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, theta),
        "partial_rotary_factor": _rotary_dim(keys) / keys.head_dim,
    }


def _rope_scaling(keys: Keys, theta: float) -> dict[str, Any] | None:
    file = keys.file
    if _ROPE_FACTORS in file.tensors:
        return llama3_scaling(file.path, file.tensors[_ROPE_FACTORS], theta)
    original = keys.get("rope.scaling.original_context_length")
    if keys.has(_LONG_FACTORS):
        return longrope_scaling(
            file,
            long=_LONG_FACTORS,
            short=_SHORT_FACTORS,
            original=original or keys.need("context_length"),
            attention_factor=keys.get("rope.scaling.attn_factor"),
        )
    kind = keys.get("rope.scaling.type") or "linear"  # llama.cpp's default, which an old file's factor relies on
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 0.0
    if kind not in ("none", "linear", "yarn"):
        raise ModelFileError(
            f"{file.path}: {keys.arch}.rope.scaling.type is {kind!r}; supported are none, linear, yarn, and llama3 and "
            "longrope with their tensors of factors."
        )
    attention = keys.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn":
        _refuse(keys, "rope.scaling.attn_factor", (1.0,))
    if kind == "none" or factor in (0.0, 1.0):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        _refuse(keys, "rope.scaling.yarn_ext_factor", (1.0, -1.0))
        if keys.arch != "deepseek2":  # which reads it
            _refuse(keys, "rope.scaling.yarn_log_multiplier", (0.0,))
        optional = {
            "original_max_position_embeddings": original,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
            "attention_factor": keys.get("rope.scaling.yarn_attn_factor", attention if attention != 1.0 else None),
        }
        scaling.update({name: value for name, value in optional.items() if value is not None})
    return scaling


def _refuse(keys: Keys, key: str, neutral: tuple[float, ...]) -> None:
    """Refuse a number that would change rotary positions in a way that the families here don't have."""
    value = keys.get(key)
    if value is not None and value not in neutral:
        raise ModelFileError(
            f"{keys.file.path}: {keys.arch}.{key} is {value}; only {neutral[0]} is supported. Use the model's "
            "safetensors checkpoint instead."
        )
