from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_gguf import LLAMA, write_gguf

from octavo.core.errors import ModelFileError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_config import generation_config, model_config
from octavo.hub.gguf_file import read_gguf

EMBEDDING = {"token_embd.weight": np.zeros((16, 32), dtype=np.float32)}


def config_of(tmp_path: Path, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    arch = options.get("arch", "llama")
    base = {key.replace("llama.", f"{arch}."): value for key, value in LLAMA.items()}
    merged = {key: value for key, value in (base | (changes or {})).items() if value is not None}
    return model_config(read_gguf(write_gguf(tmp_path / "toy.gguf", merged, **options)))


def test_the_real_model(smollm2_files: ModelFiles) -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: smollm2_files.config[key] for key in expected} == expected
    assert smollm2_files.generation_config["eos_token_id"] == [2, 0], "<|im_end|>, and <|endoftext|> by its text"


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_architectures(tmp_path: Path, arch: str, name: str) -> None:
    config = config_of(tmp_path, arch=arch)
    assert config["architectures"] == [name]
    assert config["model_type"] == arch
    assert config["attention_bias"] is (arch == "qwen2")
    assert config["head_dim"] == 8
    assert config["num_key_value_heads"] == 2
    assert config["vocab_size"] == 16
    assert config["rope_theta"] == 10000.0


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'rwkv7'; known in GGUF files are: llama, mistral, qwen2, qwen3"):
        config_of(tmp_path, arch="rwkv7")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"llama\.feed_forward_length"):
        config_of(tmp_path, {"llama.feed_forward_length": None})


def test_a_mixture_of_experts_of_a_dense_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"mixture of experts.*expert_count = 8.*with them are: llama, qwen2moe"):
        config_of(tmp_path, {"qwen2.expert_count": 8}, arch="qwen2")


def test_a_llama_with_experts_is_a_mixtral(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"llama.expert_count": 8, "llama.expert_used_count": 2})
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)


def test_one_part_of_many_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        config_of(tmp_path, {"split.count": 3})


def test_values_alike_in_all_layers_are_one_value(tmp_path: Path) -> None:
    assert config_of(tmp_path, {"llama.attention.head_count_kv": [2, 2]})["num_key_value_heads"] == 2
    with pytest.raises(ModelFileError, match=r"head_count_kv differs from layer to layer"):
        config_of(tmp_path, {"llama.attention.head_count_kv": [2, 4]})


def test_explicit_head_size(tmp_path: Path) -> None:
    sizes = {"llama.attention.key_length": 16, "llama.attention.value_length": 16}
    assert config_of(tmp_path, sizes)["head_dim"] == 16
    with pytest.raises(ModelFileError, match="only equal ones"):
        config_of(tmp_path, {"llama.attention.value_length": 16})


def test_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    assert config_of(tmp_path)["tie_word_embeddings"] is True
    assert config_of(tmp_path, tensors=EMBEDDING | {"output.weight": EMBEDDING["token_embd.weight"]})[
        "tie_word_embeddings"
    ] is (False)


def test_no_embedding(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
        config_of(tmp_path, tensors={"other": np.zeros((2, 2), dtype=np.float32)})


def test_sliding_window(tmp_path: Path) -> None:
    assert config_of(tmp_path)["sliding_window"] is None
    assert config_of(tmp_path, {"llama.attention.sliding_window": 64})["sliding_window"] == 64


def test_file_dtype(tmp_path: Path) -> None:
    dtypes = [config_of(tmp_path, {"general.file_type": kind})["torch_dtype"] for kind in (0, 1, 32, 2)]
    assert dtypes == ["float32", "float16", "bfloat16", "bfloat16"]


def test_linear_scaling(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_yarn_scaling(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0}
    config = config_of(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_kind_is_linear(tmp_path: Path, key: str) -> None:
    """As llama.cpp reads files of old converters, which have no kind, or one number under an old name."""
    config = config_of(tmp_path, {f"llama.{key}": 4.0})
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("factor", [None, 0.0, 1.0])
@pytest.mark.parametrize("kind", ["linear", "none", "yarn"])
def test_a_scaling_without_a_factor_is_none(tmp_path: Path, kind: str, factor: float | None) -> None:
    keys = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": factor}
    assert config_of(tmp_path, keys)["rope_scaling"] is None


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_the_temperature_of_yarn_is_that_of_the_file(tmp_path: Path, key: str) -> None:
    """The converter stores the configuration's `attention_factor` under one key or the other."""
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32, key: 1.25}
    config = config_of(tmp_path, {f"llama.rope.scaling.{name}": value for name, value in keys.items()})
    assert config["rope_scaling"]["attention_factor"] == 1.25


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("yarn", "yarn_ext_factor", 0.5), ("yarn", "yarn_log_multiplier", 0.1), ("none", "attn_factor", 1.25)],
)
def test_rotary_settings_that_would_be_ignored_are_refused(tmp_path: Path, kind: str, key: str, value: float) -> None:
    keys = {"type": kind, "factor": 4.0, "original_context_length": 32, key: value}
    with pytest.raises(ModelFileError, match=rf"llama\.rope\.scaling\.{key} is {value}; only"):
        config_of(tmp_path, {f"llama.rope.scaling.{name}": value for name, value in keys.items()})


def test_longrope_scaling(tmp_path: Path) -> None:
    keys = {"phi3.rope.scaling.original_context_length": 32, "phi3.rope.scaling.attn_factor": 1.25}
    factors = {
        f"rope_factors_{kind}.weight": np.full(4, value, np.float32) for kind, value in (("long", 2), ("short", 1))
    }
    assert config_of(tmp_path, keys, arch="phi3", tensors=EMBEDDING | factors)["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    }
    del factors["rope_factors_short.weight"]
    with pytest.raises(ModelFileError, match=r"lacks rope_factors_short\.weight"):
        config_of(tmp_path, keys, arch="phi3", tensors=EMBEDDING | factors)


def test_what_files_of_old_converters_lack(tmp_path: Path) -> None:
    minicpm = config_of(tmp_path, arch="minicpm")
    assert (minicpm["scale_emb"], minicpm["scale_depth"], minicpm["dim_model_base"]) == (12.0, 1.4, 256)
    gemma = config_of(tmp_path, {"gemma2.block_count": 46, "gemma2.attention.key_length": 4}, arch="gemma2")
    assert gemma["query_pre_attn_scalar"] == 8  # the hidden size per head, in the 27B only
    assert config_of(tmp_path, {"gemma2.attention.key_length": 4}, arch="gemma2")["query_pre_attn_scalar"] == 4


def test_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"phi2.rope.dimension_count": 2}, arch="phi2")
    assert config["partial_rotary_factor"] == 0.25
    with pytest.raises(ModelFileError, match=r"rotary embedding of 2 channels"):
        config_of(tmp_path, {"granite.rope.dimension_count": 2, "granite.logit_scale": 1.0}, arch="granite")


def test_unknown_scaling(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'longrope'; supported are"):
        config_of(tmp_path, {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0})


def llama3_divisors(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """As the formula of Llama 3.1 gives them, one frequency after the other."""
    divisors = []
    for pair in range(dim // 2):
        wave = 2 * math.pi * theta ** (2 * pair / dim)
        if wave < original / high:
            divisors.append(1.0)
        elif wave > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("dim", [64, 128])
def test_llama3_scaling_comes_back_from_its_divisors(tmp_path: Path, factor: float, dim: int) -> None:
    tensors = EMBEDDING | {"rope_freqs.weight": llama3_divisors(500000.0, dim, factor, 1.0, 4.0, 8192)}
    config = config_of(tmp_path, {"llama.rope.freq_base": 500000.0}, tensors=tensors)
    scaling = config["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["original_max_position_embeddings"] == 8192
    numbers = [scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor")]
    assert numbers == pytest.approx([factor, 1.0, 4.0], rel=1e-3)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    assert config_of(tmp_path, tensors=tensors)["rope_scaling"] is None


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = llama3_divisors(500000.0, 128, 8.0, 1.0, 4.0, 8192)
    divisors[40] *= 1.5
    for wrong in (divisors, np.linspace(1, 3, 64, dtype=np.float32)):
        with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
            config_of(tmp_path, {"llama.rope.freq_base": 500000.0}, tensors=EMBEDDING | {"rope_freqs.weight": wrong})


def test_generation_config(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 2,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    file = read_gguf(write_gguf(tmp_path / "toy.gguf", LLAMA | keys))
    assert generation_config(file) == {"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["<pad>", "<eos>", "a", "<start_of_turn>", "<end_of_turn>"], 1, [1, 4]),  # Gemma
        (["a", "<|endoftext|>", "<|assistant|>", "<|end|>"], 1, [1, 3]),  # Phi
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "a"], 0, [0, 1, 2]),  # Llama 3
        (["<|return|>", "<|end|>", "<|call|>", "a"], 0, [0, 2]),  # gpt-oss, whose parts end with <|end|>
        (["a", "</s>"], None, []),
    ],
)
def test_ends_of_turns_are_known_by_their_text(
    tmp_path: Path, tokens: list[str], named: int | None, ends: list[int]
) -> None:
    """Converters name one token, which is often the end of a document; llama.cpp knows the others by their text."""
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if named is not None:
        keys["tokenizer.ggml.eos_token_id"] = named
    file = read_gguf(write_gguf(tmp_path / "toy.gguf", LLAMA | keys))
    assert generation_config(file).get("eos_token_id", []) == ends


@pytest.mark.parametrize(
    ("given", "local"), [(0, [True] * 4), (1, [False] * 4), (2, [True, False] * 2), ([False, True, True, True], None)]
)
def test_patterns_of_windows(tmp_path: Path, given: Any, local: list[bool] | None) -> None:
    """A period or a list; a period of 0 gives all layers a window, as in llama.cpp."""
    keys = {"gemma3.block_count": 4, "gemma3.attention.sliding_window": 8}
    config = config_of(tmp_path, keys | {"gemma3.attention.sliding_window_pattern": given}, arch="gemma3")
    expected = ["sliding_attention" if one else "full_attention" for one in local or given]
    assert config["layer_types"] == expected


def test_an_unknown_function_of_a_router_is_refused(tmp_path: Path) -> None:
    """4 is the root of a softplus; as a softmax, other experts would be chosen."""
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_gating_func": 4}
    with pytest.raises(ModelFileError, match=r"dots1\.expert_gating_func is 4; supported are 1 \(softmax\)"):
        config_of(tmp_path, {f"dots1.{key}": value for key, value in keys.items()}, arch="dots1")
