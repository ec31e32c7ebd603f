"""Models of Transformers as GGUF files, laid out as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from octavo.hub.files import ModelFiles
from octavo.hub.gguf_config import model_config
from octavo.hub.gguf_file import read_gguf

ARCHS = {gguf.MODEL_ARCH_NAMES[arch]: arch for arch in gguf.MODEL_ARCH}
PAIRED = {"llama", "arcee", "granite", "granitehybrid", "granitemoe", "minicpm", "internlm2", "olmo", "smollm3"}
"""Architectures whose q and k the converter permutes."""
MAMBA2 = {"mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe"}
ONE_MORE = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
"""Architectures to whose norms it adds one."""


def write_model(path: Path, model: Any, arch: str, kinds: list[Kind] | None = None, **metadata: Any) -> ModelFiles:
    """Write a model and return the file as the hub describes it.

    Args:
        kinds: quantization of matrices, in turn, as far as their rows divide into blocks; None for none.
        metadata: values below the architecture's prefix, with "__" for ".".
    """
    config = model.config
    apart = "attention__key_length_mla" in metadata  # keys' and values' expansions, as newer converters store them
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch, metadata.keys())
    adders = {int: writer.add_uint32, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}
    for key, value in metadata.items():
        adders[type(value)](f"{arch}.{key.replace('__', '.')}", value)
    layers = _first(config, "num_hidden_layers", "n_layer")
    names = gguf.get_tensor_name_map(ARCHS[arch], layers)
    for name, tensor in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or ".act_fn." in name:
            continue
        if ".experts." in name:
            parts = dict(_expert_tensors(arch, name, tensor))
        elif ".shared_mlp." in name and "_linear." in name:
            parts = dict(_shared_tensors(name, tensor, "_shexp" if config.num_local_experts else ""))
        else:
            name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")  # as published
            name = name.replace(".dt_bias", ".dt_proj.bias")
            if arch.startswith("nemotron_h"):
                name = name.replace("model.", "backbone.", 1)
            found = names.get_name(name.removeprefix("transformer." if arch == "bloom" else ""), _SUFFIXES)
            if name.endswith("e_score_correction_bias"):
                found, tensor = f"blk.{name.split('.')[2]}.exp_probs_b", tensor.flatten()
            if ".kv_b_proj." in name and apart:
                nope = config.qk_nope_head_dim
                keys, values = tensor.unflatten(0, (config.num_attention_heads, -1)).split([nope, config.v_head_dim], 1)
                layer = f"blk.{name.split('.')[2]}"
                writer.add_tensor(f"{layer}.attn_k_b.weight", keys.transpose(1, 2).contiguous().numpy())
                writer.add_tensor(f"{layer}.attn_v_b.weight", values.contiguous().numpy())
                continue
            assert found is not None, f"{arch} has no tensor {name}"
            if ".in_proj_qkvz." in name and "full_attention_interval" in metadata:  # as newer converters store it
                for stored_name, part in _by_kind(name, tensor, config):
                    writer.add_tensor(stored_name, part.contiguous().numpy())
                continue
            parts = {_with_suffix(found): _converted(arch, config, name, tensor)}
        for stored_name, part in parts.items():
            stored, kind = part.contiguous().numpy(), None
            is_matrix = part.dim() > 1 and not stored_name.endswith(".bias")
            if kinds and is_matrix and part.shape[-1] % 32 == 0:
                kind = kinds[len(writer.tensors[0]) % len(kinds)]
                stored = gguf.quants.quantize(stored, kind)
            writer.add_tensor(stored_name, stored, raw_dtype=kind)
    _write_activation(writer, model)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config).numpy())
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_files(path)


def _write_activation(writer: gguf.GGUFWriter, model: Any) -> None:
    """Write parameters of activations, which are metadata."""
    numbers: dict[str, list[float]] = {}
    for name, tensor in model.state_dict().items():
        if ".act_fn." in name:
            numbers.setdefault(name.rpartition(".")[2], []).append(tensor.item())
    for name, values in numbers.items():
        getattr(writer, f"add_xielu_{name}")(values)


_SCALES = {Kind.Q2_K: 80, Kind.Q3_K: 108, Kind.Q6_K: 208}
"""Where a block has its scale in float16; at its begin, unless it is here."""
_MINIMA = {Kind.Q4_1: -7.5, Kind.Q5_1: -15.5, Kind.Q4_K: 7.5, Kind.Q5_K: 15.5, Kind.Q2_K: 1.5}
"""Formats with a minimum after the scale -> their ratio, with which values are about 0 on average."""


def random_rows(kind: Kind, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Random blocks of a format, also of those that gguf-py does not write; values have the size of weights."""
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] // per_block, size), dtype=np.uint8)
    if kind == Kind.MXFP4:  # has an exponent instead of a scale
        raw[..., 0] = 125 - int(math.log2(shape[-1])) // 2 + raw[..., 0] % 2
        return raw.reshape(*shape[:-1], -1)
    place, factor = _SCALES.get(kind, 0), 1.0
    for _ in range(2):  # the first time to know how large values are with scales of 1
        scales = random.uniform(0.5, 1.5, (*raw.shape[:-1], 1)) * factor
        raw[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
        if kind in _MINIMA:
            raw[..., place + 2 : place + 4] = (scales * _MINIMA[kind]).astype(np.float16).view(np.uint8)
        rows = raw.reshape(*shape[:-1], -1)
        factor = shape[-1] ** -0.5 / float(gguf.quants.dequantize(rows, kind).std())
    return rows


_SUFFIXES = (".weight", ".bias")


def _with_suffix(name: str) -> str:
    """The name of a tensor; some that are no module's have one of a module's in GGUF files."""
    return (
        name
        if name.endswith((*_SUFFIXES, "ssm_a", "ssm_d"))
        else name + (".bias" if "exp_probs_b" in name else ".weight")
    )


def _by_kind(name: str, tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """A gated delta net's queries, keys and values, and its gates, which the model keeps together by key head."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    heads = tensor.unflatten(0, (config.linear_num_key_heads, -1))
    parts = heads.split([config.linear_key_head_dim] * 2 + [values] * 2, dim=1)
    layer = f"blk.{name.split('.')[2]}"
    yield f"{layer}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in parts[:3]])
    yield f"{layer}.attn_gate.weight", parts[3].flatten(0, 1)


def _shared_tensors(name: str, tensor: Tensor, end: str) -> Iterator[tuple[str, Tensor]]:
    """Granite's dense feed-forward, whose gate and operand are in one matrix."""
    layer = name.split(".")[2]
    parts = ("gate", "up") if "input_linear" in name else ("down",)
    for part, rows in zip(parts, tensor.chunk(len(parts)), strict=True):
        yield f"blk.{layer}.ffn_{part}{end}.weight", rows


def _expert_tensors(arch: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gates, operands and outputs of all experts of a layer, from how transformers keeps them."""
    layer, (module, _, bias) = name.split(".")[2], name.rpartition(".")[2].partition("_bias")
    kind = "bias" if bias or name.endswith("_bias") else "weight"
    if arch in ("gpt-oss", "llama4") and kind == "weight":
        tensor = tensor.transpose(1, 2)
    if module != "gate_up_proj":
        yield f"blk.{layer}.ffn_{module.removesuffix('_proj')}_exps.{kind}", tensor
        return
    halves = (tensor[:, ::2], tensor[:, 1::2]) if arch == "gpt-oss" else tensor.chunk(2, dim=1)
    for part, half in zip(("gate", "up"), halves, strict=True):
        yield f"blk.{layer}.ffn_{part}_exps.{kind}", half


def gguf_files(path: Path) -> ModelFiles:
    config = model_config(read_gguf(path))
    return ModelFiles(name="tiny", path=path, format="gguf", weights=(path,), config=config)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str, given: Set[str]) -> None:
    hidden, heads = _first(config, "hidden_size", "n_embd"), _first(config, "num_attention_heads", "n_head")
    writer.add_block_count(_first(config, "num_hidden_layers", "n_layer"))
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", "seq_length") or 128)
    writer.add_embedding_length(hidden)
    if arch in ("bloom", "gpt2", "falcon"):
        writer.add_feed_forward_length(4 * hidden)
    elif "feed_forward_length" not in given:
        writer.add_feed_forward_length(_first(config, "intermediate_size_mlp", "intermediate_size"))
    writer.add_head_count(heads)
    if arch == "falcon":
        writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    elif "attention__head_count_kv" not in given and (kv_heads := _first(config, "num_key_value_heads")) is not None:
        writer.add_head_count_kv(kv_heads)
    head_dim = _first(config, "head_dim") or hidden // heads
    if getattr(config, "head_dim", None) and arch != "deepseek2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if (eps := _first(config, "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if arch == "olmo":
        writer.add_layer_norm_eps(1e-5)
    _write_rope(writer, config, head_dim)


def _write_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    if not rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    share = rope.get("partial_rotary_factor")
    if share is not None:
        writer.add_rope_dimension_count(int(share * head_dim))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _alternating(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Part of a gated delta net of Qwen3.5, whose heads of values are stored in turns: one of each head of keys."""
    keys, module = config.linear_num_key_heads, name.split(".linear_attn.")[1]
    sizes = [keys * config.linear_key_head_dim * 2, config.linear_num_value_heads * config.linear_value_head_dim]
    if module.startswith("out_proj"):
        return _in_turns(tensor.T, config).T
    if module.startswith(("in_proj_qkv", "conv1d")):
        before, values = tensor.split(sizes)
        return torch.cat([before, _in_turns(values, config)])
    return tensor if module.startswith("norm") else _in_turns(tensor, config)


def _in_turns(rows: Tensor, config: Any) -> Tensor:
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return rows.reshape(keys, heads // keys, len(rows) // heads, -1).transpose(0, 1).reshape(rows.shape)


def _converted(arch: str, config: Any, name: str, tensor: Tensor) -> Tensor:
    if arch.startswith("qwen35") and ".linear_attn." in name:
        tensor = _alternating(config, name, tensor)
    if arch in PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return interleaved(tensor, heads)
    if arch in ONE_MORE and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return tensor + 1
    if name.endswith(".conv1d.weight") or ("conv.conv" in name and tensor.dim() > 1):
        return tensor.squeeze(1)
    if name.endswith(".A_log"):
        tensor = -tensor.exp()
    if arch in MAMBA2 and name.endswith((".A_log", ".D")):
        return tensor[:, None]
    if arch in MAMBA2 and name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor.unflatten(0, (2, -1))
    if "query_key_value" in name:
        heads = _first(config, "num_attention_heads", "n_head")
        size = _first(config, "hidden_size") // heads
        kv_heads = heads
        if arch == "falcon":
            kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
        groups = tensor.unflatten(0, (kv_heads, -1, size))
        return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return tensor.T
    return tensor


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Row j of a head's first half, then row j of its second half: the order that llama.cpp's rope wants."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def llama3_divisors(config: Any) -> Tensor:
    """What the converter stores in place of Llama 3's rope parameters."""
    rope = config.rope_parameters
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for pair in range(0, config.head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (pair / config.head_dim)
        turns = rope["original_max_position_embeddings"] / wave
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(divisors)
