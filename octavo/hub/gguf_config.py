"""GGUF metadata in Hugging Face's vocabulary, so that one model builder serves both kinds of checkpoint.

Keys: ggml's docs/gguf.md. Architectures: those whose weights and rotary layout are supported.
"""

from __future__ import annotations

import struct
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.hub.gguf_file import GGUFFile
from octavo.hub.rope_factors import llama3_scaling

# GGUF architecture -> (Hugging Face class, model_type)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# general.file_type -> dtype. A quantized file does not state its original dtype; bfloat16 is what models of these
# families were trained in.
_FILE_DTYPES = {0: "float32", 1: "float16"}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_ROPE_FACTORS = "rope_freqs.weight"


def model_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent of config.json.

    Raises:
        ModelFileError: the architecture is unknown (the message lists the known ones), a key or tensor is missing, or
            the file is one part of several.
    """
    keys = _Keys(file)
    if file.metadata.get("split.count", 1) > 1:
        raise ModelFileError(
            f"{file.path} is one of {file.metadata['split.count']} parts. Join them first: "
            "llama-gguf-split --merge FIRST_PART OUTPUT.gguf"
        )
    config = {**_identity(file, keys), **_shape(file, keys), **_rope(file, keys), **_attention(file, keys)}
    tokens = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    for name, short in tokens.items():
        token = file.metadata.get(f"tokenizer.ggml.{short}_token_id")
        if token is not None:
            config[name] = token
    return config


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return the equivalent of generation_config.json: end-of-turn tokens and sampling defaults."""
    config: dict[str, Any] = {}
    ends: list[int] = []
    for key in ("eos", "eot", "eom"):
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token not in ends:
            ends.append(token)
    if ends:
        config["eos_token_id"] = ends
    for key, name in _SAMPLING.items():
        value = file.metadata.get(key)
        if value is not None:
            config[name] = _shortest(value) if isinstance(value, float) else value
    return config


class _Keys:
    """Access to the metadata below the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.arch = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list):
            value = self._same(key, value)
        return _shortest(value) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self._file.path} lacks the metadata {self.arch}.{key}; the model can't be built.")
        return value

    def _same(self, key: str, values: list[Any]) -> Any:
        if len(set(values)) != 1:
            raise ModelFileError(
                f"{self._file.path}: {self.arch}.{key} differs from layer to layer, which is not supported."
            )
        return values[0]


def _identity(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    if keys.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelFileError(
            f"{file.path} holds a model of architecture {keys.arch or '(none)'!r}; known in GGUF files are: {known}. "
            "Serve a model of one of these."
        )
    if keys.get("expert_count", 0) > 0:
        raise ModelFileError(
            f"{file.path} holds a mixture of experts ({keys.arch}.expert_count = {keys.get('expert_count')}), "
            f"which is not supported; dense models of these architectures are: {', '.join(ARCHITECTURES)}."
        )
    architecture, model_type = ARCHITECTURES[keys.arch]
    file_type = file.metadata.get("general.file_type")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": _FILE_DTYPES.get(file_type, "bfloat16") if file_type is not None else "bfloat16",
    }


def _shape(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path} lacks a token_embd.weight of two dimensions: it is not a whole model.")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _attention(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    heads = keys.need("attention.head_count")
    head_dim = keys.get("attention.key_length") or keys.need("embedding_length") // heads
    value_dim = keys.get("attention.value_length", head_dim)
    rotary_dim = keys.get("rope.dimension_count", head_dim)
    if value_dim != head_dim or rotary_dim != head_dim:
        raise ModelFileError(
            f"{file.path}: keys of {head_dim}, values of {value_dim} and rotary embedding of {rotary_dim} channels; "
            "only equal ones are supported."
        )
    window = keys.get("attention.sliding_window") or None
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "attention_bias": keys.arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }


def _rope(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    theta = keys.get("rope.freq_base", 10000.0)
    return {"rope_theta": theta, "rope_scaling": _rope_scaling(file, keys, theta)}


def _rope_scaling(file: GGUFFile, keys: _Keys, theta: float) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        return llama3_scaling(file.path, file.tensors[_ROPE_FACTORS], theta)
    if kind in ("none", ""):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelFileError(
            f"{file.path}: {keys.arch}.rope.scaling.type is {kind!r}; supported are none, linear, yarn and llama3."
        )
    scaling = {"rope_type": kind, "factor": keys.need("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        optional = {
            "original_max_position_embeddings": original,
            "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        }
        scaling.update({name: value for name, value in optional.items() if value is not None})
    return scaling


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    single = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == single:
            return short
    return value
