"""Make the files in this folder with the methods' own tools, for tests/golden/test_quantizing_tools.py.

    pip install auto-round==0.16.1 autoawq==0.2.9 bitsandbytes==0.50.2 compressed-tensors==0.20.0 hqq==0.2.8.post1 \\
        torchao==0.18.0
    python tests/data/quantized/make.py [NAME ...]

Each has the stored tensors of one random matrix below "proj.", the matrix that the tool makes of them as "expected"
[N, K], and the checkpoint's `quantization_config` in its metadata.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
ROWS, COLUMNS, GROUP = 32, 128, 32

Made = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""Settings, stored tensors, and the tool's matrix."""


def linear() -> nn.Linear:
    layer = nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data.normal_()
    return layer.requires_grad_(False)


def grid(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points [N, G] of each group's range."""
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    return scales, (-low / scales).round().clamp(0, (1 << bits) - 1)


def auto_round(bits: int, layout: str) -> Made:
    if layout == "auto_round:auto_gptq":
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    else:
        from auto_round_extension.torch.qlinear_torch import QuantLinear

    layer = linear()
    scales, zeros = grid(layer.weight, bits)
    packed = QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False)
    packed.pack(layer, scales, zeros.clamp_min(1))
    stored = {name: packed.state_dict()[name] for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "packing_format": layout}
    return settings, stored, packed(torch.eye(COLUMNS)).T


def awq() -> Made:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    layer = linear()
    scales, zeros = (part.T.contiguous() for part in grid(layer.weight, 4))
    packed = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales, zeros=zeros)
    stored = {name: packed.state_dict()[name] for name in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return settings, stored, dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).T


def compressed(kind: str, **weights: Any) -> Made:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    layer, state = linear(), {}
    width = {"tensor": COLUMNS, "channel": COLUMNS}.get(args.strategy, args.group_size)
    grouped = layer.weight.unflatten(1, (-1, width))
    extremes = [grouped.amin(-1), grouped.amax(-1)]
    if args.strategy == "tensor":
        extremes = [layer.weight.min().view(1), layer.weight.max().view(1)]
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448 * 6 / layer.weight.abs().max()).view(1)
    scales, zeros = calculate_qparams(*extremes, args, global_scale=state.get("weight_global_scale"))
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(kind)
    state |= {"weight": layer.weight.data, "weight_scale": scales, "weight_zero_point": zeros}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}, stored, expected


def four_bits(kind: str, *, nested: bool) -> Made:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(linear().weight, quant_type=kind, compress_statistics=nested)
    stored = {"weight": packed} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored, functional.dequantize_4bit(packed, state)


def eight_bits() -> Made:
    from bitsandbytes import functional

    integers, largest, _ = functional.int8_vectorwise_quant(linear().weight.half())
    expected = functional.int8_vectorwise_dequant(integers, largest)
    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, {"weight": integers, "SCB": largest}, expected


def hqq(bits: int, axis: int) -> Made:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    settings = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=axis)
    layer = HQQLinear(linear(), settings, compute_dtype=torch.float32, device="cpu")
    return {"quant_method": "hqq"}, layer.state_dict(), layer.dequantize()


def torchao(scheme: str) -> Made:
    """Int4Tensor is left out: torchao makes it with kernels that need a GPU."""
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import PerGroup, quantize_

    configs = {
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
        "int8": lambda: quantization.Int8DynamicActivationInt8WeightConfig(version=2),
        "float8": quantization.Float8WeightOnlyConfig,
    }
    model = nn.Sequential(linear())
    quantize_(model, configs[scheme]())
    stored, _ = flatten_tensor_state_dict({"proj.weight": model[0].weight})
    names = {name.removeprefix("proj."): part for name, part in stored.items()}
    return {"quant_method": "torchao", "quant_type": {"default": scheme}}, names, model[0].weight.dequantize()


MADE: dict[str, Callable[[], Made]] = {
    "auto-round-4": lambda: auto_round(4, "auto_round:auto_gptq"),
    "auto-round-8": lambda: auto_round(8, "auto_round:auto_gptq"),
    "auto-round-3": lambda: auto_round(3, "auto_round:gptqmodel"),
    "auto-round-2": lambda: auto_round(2, "auto_round:auto_gptq"),
    "awq": awq,
    "w4a16": lambda: compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "w3a16": lambda: compressed("pack-quantized", num_bits=3, type="int", strategy="group", group_size=GROUP),
    "w8a16": lambda: compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "w8a8": lambda: compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-tensor": lambda: compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "nvfp4": lambda: compressed(
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    ),
    "bnb-nf4": lambda: four_bits("nf4", nested=True),
    "bnb-fp4": lambda: four_bits("fp4", nested=False),
    "bnb-int8": eight_bits,
    "hqq-4": lambda: hqq(4, 1),
    "hqq-3": lambda: hqq(3, 1),
    "hqq-2-columns": lambda: hqq(2, 0),
    **{f"torchao-{scheme}": partial(torchao, scheme) for scheme in ("int4", "int8", "float8")},
}


def main() -> None:
    from safetensors.torch import save_file

    for name in sys.argv[1:] or MADE:
        make = MADE[name]
        torch.manual_seed(len(name))
        settings, stored, expected = make()
        tensors = {f"proj.{suffix}": part.contiguous().clone() for suffix, part in stored.items()}
        tensors["expected"] = expected.float().contiguous().clone()
        save_file(tensors, HERE / f"{name}.safetensors", {"quantization_config": json.dumps(settings, default=str)})
        print(f"{name}: {sum(part.nbytes for part in tensors.values())} bytes")


if __name__ == "__main__":
    main()
