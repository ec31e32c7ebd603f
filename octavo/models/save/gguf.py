"""Write a GGUF file (ggml's docs/gguf.md), from safetensors or from another GGUF file, with the `gguf` library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, LlamaFileType
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_config import ENDS, SAMPLING
from octavo.hub.resolve import eos_token_ids
from octavo.models.feed_forwards.spec import MlpSpec
from octavo.models.hf_rope import temperature
from octavo.models.load import open_checkpoint
from octavo.models.registry import spec_of
from octavo.models.save.folder import OnProgress, Written
from octavo.models.save.places import check_source, new_place
from octavo.models.spec import DecoderSpec
from octavo.nn.rope_spec import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from octavo.nn.weights import TensorSpec

_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Storage:
    """How a file's matrices are stored.

    Attributes:
        kind: of the layers' matrices whose rows divide into blocks of 32; others become float16.
        outer: of embeddings and head, which lose most.
        file_type: what the file calls itself.
    """

    kind: Kind
    outer: Kind
    file_type: LlamaFileType
    about: str


STORAGES: Mapping[str, Storage] = {
    "gguf-q4_0": Storage(Kind.Q4_0, Kind.Q8_0, LlamaFileType.MOSTLY_Q4_0, "4 bits, a scale per 32 inputs"),
    "gguf-q4_1": Storage(Kind.Q4_1, Kind.Q8_0, LlamaFileType.MOSTLY_Q4_1, "4 bits, a scale and a minimum"),
    "gguf-q5_0": Storage(Kind.Q5_0, Kind.Q8_0, LlamaFileType.MOSTLY_Q5_0, "5 bits, a scale"),
    "gguf-q5_1": Storage(Kind.Q5_1, Kind.Q8_0, LlamaFileType.MOSTLY_Q5_1, "5 bits, a scale and a minimum"),
    "gguf-q8_0": Storage(Kind.Q8_0, Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0, "8 bits, a scale"),
    "gguf-f16": Storage(Kind.F16, Kind.F16, LlamaFileType.MOSTLY_F16, "float16"),
    "gguf-bf16": Storage(Kind.BF16, Kind.BF16, LlamaFileType.MOSTLY_BF16, "bfloat16"),
}
"""`--scheme` -> storage. Embeddings and heads of all but the last two are in Q8_0."""

_ARCHS = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
"""Architectures that llama.cpp's converter stores without other changes than `_paired`."""
_OWN_KEYS = ("GGUF.", "split.", "general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class _Source:
    """A model, as llama.cpp names and arranges it.

    Attributes:
        arch: its name in the format.
        keys: writes the metadata.
        shapes: of all tensors.
        tensor: reads one, as float32.
    """

    arch: str
    keys: Callable[[GGUFWriter], None]
    shapes: Mapping[str, tuple[int, ...]]
    tensor: Callable[[str], Tensor]


def write_gguf(
    files: ModelFiles,
    storage: Storage,
    path: Path,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    progress: OnProgress = lambda phase, done, total: None,
) -> Written:
    """Write a model to a GGUF file, one tensor at a time.

    Args:
        tokenizer: the tokenizer's keys, for a source in safetensors (`text/tokenizers/gguf_keys.py`).

    Raises:
        ConfigError: the model is quantized already, the file exists or can't be written, or llama.cpp arranges the
            family otherwise.
        ModelFileError: the checkpoint can't be read.
    """
    if path.exists():
        raise ConfigError(f"{path} exists. Name a new file.")
    check_source(files)
    source = _of_gguf(files) if files.format == "gguf" else _of_safetensors(files, dict(tokenizer or {}))
    kinds = {name: _kind(name, shape, storage) for name, shape in source.shapes.items()}
    with new_place(path, folder=False), closing(GGUFWriter(path, source.arch)) as writer:
        after = _write(writer, source, kinds, storage, progress)
    total = 2 * sum(map(math.prod, source.shapes.values()))
    return Written(sum(kind is storage.kind for kind in kinds.values()), total, after, 0)


def _write(
    writer: GGUFWriter, source: _Source, kinds: Mapping[str, Kind], storage: Storage, progress: OnProgress
) -> int:
    """Write keys and tensors; return the tensors' bytes."""
    writer.add_file_type(storage.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    source.keys(writer)
    after = sum(_declare(writer, name, shape, kinds[name]) for name, shape in source.shapes.items())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, done = 2 * sum(map(math.prod, source.shapes.values())), 0
    for name, shape in source.shapes.items():
        writer.write_tensor_data(gguf.quants.quantize(source.tensor(name).numpy(), kinds[name]))
        done += 2 * math.prod(shape)
        progress("quantize", done, total)
    return after


def _kind(name: str, shape: tuple[int, ...], storage: Storage) -> Kind:
    if len(shape) != 2:
        return Kind.F32
    kind = storage.outer if name in ("token_embd.weight", "output.weight") else storage.kind
    return kind if kind in (Kind.F16, Kind.BF16) or shape[1] % _BLOCK == 0 else Kind.F16


def _declare(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: Kind) -> int:
    """Add a tensor that is written later; return its bytes."""
    plain = {Kind.F32: np.float32, Kind.F16: np.float16}.get(kind)
    size = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
    if plain is not None:
        writer.add_tensor_info(name, shape, np.dtype(plain), size)
    else:
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    return size


def _of_gguf(files: ModelFiles) -> _Source:
    """The tensors of a GGUF file keep their names and arrangement, and its keys their types."""
    reader = gguf.GGUFReader(files.weights[0])
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def keys(writer: GGUFWriter) -> None:
        for name, field in reader.fields.items():
            if not name.startswith(_OWN_KEYS):
                writer.add_key_value(
                    name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None
                )

    def tensor(name: str) -> Tensor:
        stored = tensors[name]
        values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32)
        return torch.from_numpy(values.reshape(shapes[name]))

    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    return _Source(reader.fields["general.architecture"].contents(), keys, shapes, tensor)


def _of_safetensors(files: ModelFiles, tokenizer: dict[str, Any]) -> _Source:
    (architecture, *_) = files.config.get("architectures") or [None]
    if architecture not in _ARCHS:
        raise ConfigError(
            f"octavo quantize writes GGUF files of {', '.join(_ARCHS)}, not of {architecture}. Convert the model with "
            "llama.cpp's convert_hf_to_gguf.py, and give that file here."
        )
    config, arch, spec = files.config, _ARCHS[architecture], spec_of(files.config)
    _check(spec, gguf.MODEL_ARCH_NAMES[arch])
    checkpoint = open_checkpoint(files)
    places = dict(_places(config, arch, checkpoint.names()))
    divisors = _rope_divisors(spec.rope)
    shapes = {name: checkpoint.shape(stored) or () for name, stored in places.items()}

    def tensor(name: str) -> Tensor:
        if name == "rope_freqs.weight":
            assert divisors is not None
            return divisors
        values = checkpoint.tensor(places[name], TensorSpec(shapes[name], torch.float32)).float()
        return _arranged(config, arch, name, values).contiguous()

    def keys(writer: GGUFWriter) -> None:
        _write_config(writer, config, spec, files.name)
        for name, value in (tokenizer | _answers(files, tokenizer)).items():
            _add(writer, name, value)

    if divisors is not None:
        shapes["rope_freqs.weight"] = tuple(divisors.shape)
    return _Source(gguf.MODEL_ARCH_NAMES[arch], keys, shapes, tensor)


def _places(config: Mapping[str, Any], arch: gguf.MODEL_ARCH, names: Any) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name in the format, and as it is stored."""
    known = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name in sorted(names):
        if (name == "lm_head.weight" and config.get("tie_word_embeddings")) or "rotary_emb" in name:
            continue
        found = known.get_name(name, (".weight", ".bias"))
        if found is None:
            raise ConfigError(
                f"llama.cpp has no place for the tensor {name} in models of {gguf.MODEL_ARCH_NAMES[arch]}. Choose a "
                "format that is not gguf-*."
            )
        yield found, name


def _arranged(config: Mapping[str, Any], arch: gguf.MODEL_ARCH, name: str, values: Tensor) -> Tensor:
    """Put the rows of a Llama's q and k in the order of llama.cpp's rope: channel i beside i + half."""
    stem = name.split(".")[-2]
    if arch is not gguf.MODEL_ARCH.LLAMA or stem not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads"]
    if stem == "attn_k":
        heads = config.get("num_key_value_heads") or heads
    return values.view(heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _answers(files: ModelFiles, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the model's generation_config.json: defaults of sampling, and tokens that end answers.

    Raises:
        ConfigError: there are more such tokens than the format has keys.
    """
    stated = {key: files.generation_config.get(name) for key, name in SAMPLING.items()}
    keys = {key: value if key.endswith("top_k") or value is None else float(value) for key, value in stated.items()}
    tokens = tokenizer.get("tokenizer.ggml.tokens", [])
    named = tokenizer.get("tokenizer.ggml.eos_token_id")
    shorts = ("eot", "eom") if named is not None else ("eos", "eot", "eom")
    # Readers know some of them by their text.
    ends = [one for one in eos_token_ids(files) if one != named and one < len(tokens) and tokens[one] not in ENDS]
    if len(ends) > len(shorts):
        raise ConfigError(
            f"{files.name} has {len(ends)} further tokens that end answers ({', '.join(map(str, ends))}), and GGUF "
            f"files have keys for {len(shorts)}. Choose a --scheme that is not gguf-*."
        )
    keys |= {f"tokenizer.ggml.{short}_token_id": end for short, end in zip(shorts, ends, strict=False)}
    return {key: value for key, value in keys.items() if value is not None}


def _check(spec: DecoderSpec, arch: str) -> None:
    """Refuse what the format has no keys for, since readers would compute another model."""
    windows = {window for window in spec.windows if window is not None and window < spec.max_position}
    activations = {mlp.activation for mlp in spec.mlps if isinstance(mlp, MlpSpec)} - {"silu"}
    scaling = spec.rope.scaling
    odd = [
        *(f"a sliding window of {window} tokens" for window in windows),
        *(f"the activation {activation}" for activation in activations),
        *(["rotary positions of a part of each head"] if spec.rope.width != spec.rope.rotary_dim else []),
        *(
            ["YaRN whose frequencies are not rounded"]
            if isinstance(scaling, YarnScaling) and not scaling.truncate
            else []
        ),
        *(["rotary positions scaled by LongRoPE"] if isinstance(scaling, LongRopeScaling) else []),
        *(["proportional rotary positions"] if isinstance(scaling, ProportionalScaling) else []),
    ]
    if odd:
        raise ConfigError(
            f"The model has {odd[0]}, for which GGUF files of {arch} have no key. Choose a --scheme that is not gguf-*."
        )


def _rope_divisors(rope: RopeSpec) -> Tensor | None:
    """Return what the format stores in place of Llama 3's rope parameters: a divisor of each pair's frequency."""
    scaling, size = rope.scaling, rope.rotary_dim
    if not isinstance(scaling, Llama3Scaling):
        return None
    waves = torch.pow(rope.theta, torch.arange(0, size, 2, dtype=torch.float64) / size) * (2 * math.pi)
    turns, low = scaling.original_max_position / waves, scaling.low_freq_factor
    smooth = ((turns - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).float()


def _write_config(writer: GGUFWriter, config: Mapping[str, Any], spec: DecoderSpec, name: str) -> None:
    writer.add_type("model")
    writer.add_name(Path(name).name)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_vocab_size(spec.vocab_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm.eps)
    _write_rope(writer, spec.rope)


def _write_rope(writer: GGUFWriter, rope: RopeSpec) -> None:
    writer.add_rope_dimension_count(rope.rotary_dim)
    writer.add_rope_freq_base(rope.theta)
    match rope.scaling:
        case LinearScaling():
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.scaling.factor)
        case YarnScaling():
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope.scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(rope.scaling.original_max_position)
            writer.add_rope_scaling_yarn_beta_fast(rope.scaling.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(rope.scaling.beta_slow)
            if rope.scaling.attention_factor != temperature(rope.scaling.factor):
                writer.add_rope_scaling_yarn_attn_factor(rope.scaling.attention_factor)


def _add(writer: GGUFWriter, name: str, value: bool | int | float | str | list[Any]) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)
