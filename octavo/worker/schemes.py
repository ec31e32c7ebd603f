"""Which schemes store a model's linear layers, by device, checkpoint and settings."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from gguf import GGMLQuantizationType

from octavo.config import ModelConfig
from octavo.core.errors import ConfigError
from octavo.device.base import Device
from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import read_gguf
from octavo.hub.text_config import quantization_config
from octavo.models.load.gguf_blocks import CODES, INTEGERS
from octavo.models.load.quantized.table import METHODS, rounds_activations
from octavo.nn.quant.base import Apart, Schemes, everywhere
from octavo.nn.quant.blocks import BlockQuantized, RoundedBlocks
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.onednn import OneDNN, packing_works
from octavo.nn.weights import Keep, fused
from octavo.worker.invariance import check_weights

AT_LOAD = ("fp8", "w8a8", "w8a16", "w4a16")
"""Methods of `ONLINE` (nn/quant/online.py), which can be imported only with Triton."""
_PACKED = ("auto-round", "awq", "gptq")
"""Methods whose matrices are all integers."""
_GROWTH: dict[int | None, float] = {3: 1.5, 4: 1.25, 8: 1.25}
"""Bits of packed integers on disk -> their bytes on a GPU, as a multiple of those on disk, at most."""
_MOST_GROWTH = 2
_KEPT = ("bitsandbytes", "torchao")
"""Methods whose matrices of any form stay packed, but for experts in tables of 4 bits."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of configurations of models with experts."""

if TYPE_CHECKING:
    from octavo.nn.quant.online import Online

_HEAD = "lm_head"
_TABLE, _HEAD_TENSOR = "token_embd.weight", "output.weight"
_FOURS = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K)
"""Types whose numbers keep 4 bits; those of others get 8."""
_FOUR_BITS, _EIGHT_BITS = 6, 10
"""Bits of a number with its share of scale, minimum and padding, at most: both in float16 for 32, or 16 numbers."""


def schemes_of(
    config: ModelConfig,
    files: ModelFiles,
    device: Device,
    dtype: torch.dtype,
    keep: Keep = fused,
    *,
    native: bool = False,
    invariant: bool = False,
) -> Schemes:
    """Return the schemes of a model. Quantized weights are kept where kernels multiply with them and no dtype is set.

    Args:
        native: the model will run as a native program.
        invariant: results must not depend on the batch; see `invariance.py`.

    Raises:
        ConfigError: `config.quantization` is unknown, or does not fit the checkpoint or the device; the head is to be
            rounded, but the model can't multiply with integers.
    """
    online = online_of(config, files, device)
    where, keeps_integers = device.torch_device, native and config.dtype == "auto"
    if config.head_dtype != "auto" and not keeps_integers:
        raise ConfigError(
            f"--head-dtype {config.head_dtype} is for models that Octavo's kernels run on a CPU, without --dtype. "
            "Leave it out."
        )
    if native:
        schemes = everywhere(BlockQuantized if keeps_integers else Unquantized, dtype, where, keep)
        if config.head_dtype == "auto":
            return schemes
        return Apart(_HEAD, partial(RoundedBlocks, dtype, where, keep), schemes)
    keeps_packed = device.resident and (
        online is not None or (config.dtype == "auto" and method_name(files) is not None)
    )
    if invariant:
        check_weights(dtype, native=native, resident=device.resident, packed=keeps_packed)
        from octavo.nn.quant.ordered import Ordered

        return everywhere(Ordered, dtype, where, keep)
    if not device.resident:
        return everywhere(OneDNN if packing_works(dtype) else Unquantized, dtype, where, keep)
    # These need Triton, which machines without a GPU may lack.
    if keeps_packed:
        from octavo.nn.quant.packed_gpu import PackedSchemes

        return PackedSchemes(dtype, where, keep, online, rounds=rounds_activations(files.config))
    from octavo.nn.quant.gpu import OnGpu

    return everywhere(OnGpu, dtype, where, keep)


def online_of(config: ModelConfig, files: ModelFiles, device: Device) -> Online | None:
    """Return how to quantize weights when they are loaded; None for not at all. Raises as `schemes_of`."""
    wanted = online_method(config, files, resident=device.resident)
    if wanted is None:
        return None
    from octavo.nn.quant.online import ONLINE

    return ONLINE[wanted]


def online_method(config: ModelConfig, files: ModelFiles, *, resident: bool) -> str | None:
    """Return the name in `AT_LOAD` of the method of `online_of`; None for none. Raises as `schemes_of`.

    Args:
        resident: the device is a GPU.
    """
    wanted, stored = config.quantization, method_name(files)
    if wanted is None or wanted == stored:
        return None
    if wanted not in AT_LOAD and wanted not in METHODS:
        raise ConfigError(
            f"--quantization {wanted}: there is no such method. On a GPU, weights can be quantized by "
            f"{', '.join(AT_LOAD)}. Use one of these, or leave the flag out: a quantized checkpoint needs none."
        )
    if wanted in METHODS and (stored is not None or wanted != "fp8"):
        raise ConfigError(
            f"--quantization {wanted}: the checkpoint's quantization is {stored or 'none'}. Leave the flag out, or "
            f"serve a checkpoint that was quantized by {wanted}."
        )
    if not resident:
        raise ConfigError(
            f"--quantization {wanted} quantizes weights on an NVIDIA GPU (--device cuda). On a CPU serve a quantized "
            "checkpoint; `octavo quantize` makes one."
        )
    if stored is not None:
        raise ConfigError(
            f"--quantization {wanted}: the weights are quantized already, by {stored}. Leave the flag out."
        )
    return wanted


def needed_bytes(
    wanted: int, whole: Callable[[], int], config: ModelConfig, files: ModelFiles, *, resident: bool
) -> int:
    """Return how many bytes a rank's weights will take at most, as its share of all weights.

    Packed integers keep their bytes, but those of 2 and 3 bits get 4, and zero points become minima in float16. Other
    weights of 8 bits take a sixteenth more for scales, also those of experts, or an eighth with groups, and tables of 4
    bits a quarter. GGUF's types are counted one by one.

    Args:
        wanted: bytes of the rank's weights without quantization.
        whole: returns those of all weights of the checkpoint; 0 if it has none.
        resident: the device keeps packed weights in kernels of its own.
    """
    if not resident or config.dtype != "auto" or not files.weight_bytes:
        return wanted
    packed = _packed_bytes(files)
    if packed is None:
        return wanted
    return min(wanted, -(-packed * wanted // max(whole(), wanted, 1)))


def _packed_bytes(files: ModelFiles) -> int | None:
    """Return at most how many bytes all weights of a checkpoint take on a GPU; None if some may be expanded."""
    if method_name(files) in _PACKED:
        settings = _settings(files)
        return int(files.weight_bytes * _GROWTH.get(settings.get("bits", settings.get("w_bit")), _MOST_GROWTH))
    if files.format == "gguf":
        return _gguf_bytes(files)
    if _has_8_bits(files) and rounds_activations(files.config):
        return files.weight_bytes * 17 // 16
    if _settings(files).get("load_in_4bit"):
        return None if _has_experts(files) else files.weight_bytes * 5 // 4
    keeps = _has_8_bits(files) or method_name(files) in _KEPT
    return files.weight_bytes * 9 // 8 if keeps else None


def least_bytes(wanted: int, config: ModelConfig, files: ModelFiles) -> int:
    """Return at least how many bytes the weights will take, of `wanted` bytes without quantization."""
    packed = config.quantization is not None or method_name(files) is not None or files.format == "gguf"
    return 0 if packed else wanted


def _gguf_bytes(files: ModelFiles) -> int:
    """Return at most how many bytes a GGUF's tensors take on a GPU.

    Projections that are fused take 8 bits each if their types differ.
    """
    tensors = [tensor for path in files.weights for tensor in read_gguf(path).tensors.values()]
    fused: dict[str, set[int]] = defaultdict(set)
    for tensor in tensors:
        fused[_fused(tensor.name)].add(tensor.kind)
    total = 0
    for tensor in tensors:
        kind = GGMLQuantizationType(tensor.kind)
        bits = 32 if kind == GGMLQuantizationType.F32 else 16
        if "embd" not in tensor.name and (kind in INTEGERS or kind in CODES):
            bits = _FOUR_BITS if kind in _FOURS and len(fused[_fused(tensor.name)]) == 1 else _EIGHT_BITS
        total += prod(tensor.shape) * bits // 8
        if tensor.name == _TABLE and _HEAD_TENSOR not in fused:
            total += prod(tensor.shape) * 2  # the head may have a copy
    return total


def _fused(name: str) -> str:
    """Return the common name of the projections that one layer may fuse."""
    return re.sub(r"(attn)_[qkv]\b|(ffn)_(?:gate|up)(?=\b|_)", r"\1\2", name)


def _has_8_bits(files: ModelFiles) -> bool:
    """Return whether all quantized weights of a checkpoint have 8 bits."""
    groups = _settings(files).get("config_groups") or {}
    return method_name(files) == "fp8" or (
        bool(groups) and all((group.get("weights") or {}).get("num_bits") == 8 for group in groups.values())
    )


def _has_experts(files: ModelFiles) -> bool:
    configs = files.config, files.config.get("text_config") or {}
    return any((config.get(key) or 0) > 1 for config in configs for key in _EXPERTS)


def method_name(files: ModelFiles) -> str | None:
    """Return the method by which a checkpoint is quantized; None if it is not."""
    if files.format == "gguf":
        return "gguf"
    return _settings(files).get("quant_method")


def _settings(files: ModelFiles) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = quantization_config(files.config)
    return settings
