"""Quantized checkpoints, packed bit by bit as each format's specification says, with their values in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.models.load.quantized.codes import FLOATS
from octavo.nn.weights import Codebook, QuantizedBlocks

Stored = dict[str, Tensor]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Example:
    """A way to store matrices.

    Attributes:
        settings: the checkpoint's `quantization_config`.
        write: matrix [N, K] -> the stored tensors by suffix, and the values in float64 that they stand for.
        packs: kernels can keep the integers.
        codes: the CPU's kernels can keep the codes.
    """

    settings: dict[str, Any]
    write: Callable[[Tensor], tuple[Stored, Tensor]]
    packs: bool = True
    codes: bool = False


def words(integers: Tensor, bits: int) -> Tensor:
    """Rows of integers as a stream of bits in words of 32, least significant first; zeros fill the last word."""
    stream = (integers[..., None] >> torch.arange(bits) & 1).flatten(1).numpy().astype(np.uint8)
    whole = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(whole, axis=1, bitorder="little").view("<i4").copy())


def rounded(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [N, K], scales [N, G] and zero points [N, G], from each group's range."""
    top, groups = (1 << bits) - 1, weight.shape[1] // group
    place = torch.arange(weight.shape[1]) // group if order is None else order
    scales, zeros = torch.empty(len(weight), groups), torch.empty(len(weight), groups, dtype=torch.int64)
    integers = torch.empty(weight.shape, dtype=torch.int64)
    for g in range(groups):
        part = weight[:, place == g]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).clamp_min(1e-4).half().float()
        zero = torch.full_like(scale, 1 << (bits - 1)) if symmetric else (-low / scale).round().clamp(0, top)
        scales[:, g], zeros[:, g] = scale, zero.long()
        integers[:, place == g] = (part / scale[:, None] + zero[:, None]).round().clamp(0, top).long()
    return integers, scales, zeros


def value(integers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None) -> Tensor:
    place = torch.arange(integers.shape[1]) // (integers.shape[1] // scales.shape[1]) if order is None else order
    return (integers.double() - zeros.double()[:, place]) * scales.double()[:, place]


def gptq(bits: int, group: int, *, version: int = 1, symmetric: bool = True, act_order: bool = False) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        size = weight.shape[1] if group == -1 else group
        order = torch.arange(weight.shape[1]) // size
        if act_order:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))]
        integers, scales, zeros = rounded(weight, bits, size, symmetric=symmetric, order=order)
        if version == 1:
            zeros = zeros.clamp_min(1)
        stored = {
            "qweight": words(integers, bits).T.contiguous(),
            "qzeros": words((zeros - (2 - version)).T, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": order.int(),
        }
        return stored, value(integers, scales, zeros, order)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric}
    return Example({**settings, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}, write)


def awq(group: int, layout: str) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        integers, scales, zeros = rounded(weight, 4, group, symmetric=False)
        exact = value(integers, scales, zeros)
        if layout == "gemm":

            def packed(matrix: Tensor) -> Tensor:
                return words(matrix.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

            return {"qweight": packed(integers), "qzeros": packed(zeros), "scales": scales.T.half().contiguous()}, exact
        over = -zeros.shape[1] % 8
        zeros, scales = (torch.nn.functional.pad(part, (0, over)) for part in (zeros, scales))
        return {"qweight": words(integers, 4), "qzeros": words(zeros, 4), "scales": scales.half()}, exact

    return Example({"quant_method": "awq", "bits": 4, "group_size": group, "version": layout}, write)


def packed_integers(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        order = torch.arange(weight.shape[1]) // group
        if act_order:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))]
        integers, scales, zeros = rounded(weight, bits, group, symmetric=symmetric, order=order)
        stored = {
            "weight_packed": words(integers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if act_order:
            stored["weight_g_idx"] = order.int()
        return stored, value(integers, scales, zeros, order)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    weights["actorder"] = "group" if act_order else None
    return Example(compressed("pack-quantized", weights), write)


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def int8(asymmetric: bool = False) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        integers, scales, zeros = rounded(weight, 8, weight.shape[1], symmetric=not asymmetric)
        stored = {"weight": (integers - 128).to(torch.int8), "weight_scale": scales}
        if asymmetric:
            stored["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return stored, value(integers, scales, zeros)

    form = {"num_bits": 8, "type": "int", "symmetric": not asymmetric}
    return Example(compressed("int-quantized", form, form), write)


def bnb_int8() -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        largest = weight.abs().amax(1)
        integers = (weight * 127 / largest[:, None]).round().to(torch.int8)
        stored = {"weight": integers, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, integers.double() * largest.double()[:, None] / 127

    return Example({"quant_method": "bitsandbytes", "load_in_8bit": True}, write)


INPUT_SCALE = 0.03
"""Of activations up to 13.4."""


def fp8(scales: str, dtype: torch.dtype = torch.float8_e4m3fn, method: str = "fp8", *, static: bool = False) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        largest = torch.finfo(dtype).max
        rows, columns = {"tensor": weight.shape, "channel": (1, weight.shape[1]), "tiles": (128, 128)}[scales]
        factors = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        narrow, exact = torch.empty(weight.shape, dtype=dtype), torch.empty(weight.shape, dtype=torch.float64)
        for i in range(factors.shape[0]):
            for j in range(factors.shape[1]):
                tile = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                factors[i, j] = factor = weight[tile].abs().max() / largest
                narrow[tile] = (weight[tile] / factor).to(dtype)
                exact[tile] = narrow[tile].double() * factor.double()
        name = "weight_scale_inv" if scales == "tiles" and method == "fp8" else "weight_scale"
        inputs = {"input_scale": torch.tensor(INPUT_SCALE)} if static else {}
        return {"weight": narrow, name: factors[0, 0] if scales == "tensor" else factors, **inputs}, exact

    if method == "compressed-tensors":
        form = {"num_bits": 8, "type": "float", "strategy": "block" if scales == "tiles" else scales}
        inputs = {**form, "strategy": "tensor", "dynamic": False} if static else form
        return Example(compressed("float-quantized", form, inputs), write, packs=False, codes=True)
    block = {"weight_block_size": [128, 128]} if scales == "tiles" else {}
    settings = {"quant_method": method, "activation_scheme": "static" if static else "dynamic", **block}
    if method == "modelopt":
        settings |= {"quant_algo": "FP8" if static else "FP8_PER_CHANNEL_PER_TOKEN"}
    return Example(settings, write, packs=False, codes=True)


def pairs(codes: Tensor, *, high_first: bool = False) -> Tensor:
    first, second = codes[..., 0::2], codes[..., 1::2]
    low, high = (second, first) if high_first else (first, second)
    return (low | high << 4).to(torch.uint8)


def e2m1(values: Tensor) -> Tensor:
    """Codes of the nearest numbers."""
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    return (values[..., None] - table).abs().argmin(-1)


def e2m1_values(codes: Tensor) -> Tensor:
    return torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.float64)[codes]


def nvfp4(method: str) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        grouped = weight.unflatten(1, (-1, 16))
        whole = weight.abs().max() / (448 * 6)
        scales = (grouped.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
        factors = scales.double() * whole.double()
        codes = e2m1(grouped / factors.float().clamp_min(1e-9)[..., None])
        exact = (e2m1_values(codes) * factors[..., None]).flatten(1)
        packed = pairs(codes.flatten(1))
        if method == "modelopt":
            return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": whole * 2}, exact
        inverse = 1 / whole
        return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": inverse.view(1)}, exact

    if method == "modelopt":
        return Example({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write, packs=False, codes=True)
    return Example(compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), write, packs=False, codes=True)


def powers(grouped: Tensor, largest: float) -> Tensor:
    """E8M0 exponents that bring each group below a format's largest number."""
    return (torch.log2(grouped.abs().amax(-1) / largest).ceil() + 127).clamp(0, 254).to(torch.uint8)


def mx(bits: int) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        grouped = weight.unflatten(1, (-1, 32))
        exponents = powers(grouped, 6.0 if bits == 4 else 448.0)
        factors = torch.exp2(exponents.double() - 127)[..., None]
        small = grouped / factors.float()
        if bits == 8:
            narrow = small.to(torch.float8_e4m3fn)
            return {"weight": narrow.flatten(1), "weight_scale": exponents}, (narrow.double() * factors).flatten(1)
        codes = e2m1(small)
        exact = (e2m1_values(codes) * factors).flatten(1)
        return {"weight_packed": pairs(codes.flatten(1)), "weight_scale": exponents}, exact

    kind = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    return Example(compressed(kind, {"num_bits": bits, "type": "float"}), write, packs=False, codes=True)


def bnb(kind: str, *, nested: bool) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        table = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).abs() ** 1.3
        flat = weight.flatten().view(-1, 64)
        largest = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        stored = {"weight.quant_map": table}
        if nested:
            steps, outer = torch.linspace(-1, 1, 256), (largest - largest.mean()).abs().max()
            codes = ((largest - largest.mean())[:, None] / outer - steps).abs().argmin(1)
            count = -(-len(largest) // 256)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(largest.mean())}
            stored |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_quant_map": steps}
            stored["weight.nested_absmax"] = outer.expand(count).clone()
            largest = (steps[codes].double() * outer.double() + state["nested_offset"]).float()
        else:
            stored["weight.absmax"] = largest
        codes = (flat[..., None] / largest[:, None, None] - table).abs().argmin(-1)
        stored["weight"] = pairs(codes.flatten(), high_first=True).view(-1, 1)
        text = json.dumps(state).encode()
        stored[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, (table.double()[codes] * largest.double()[:, None]).view(weight.shape)

    return Example({"quant_method": "bitsandbytes", "load_in_4bit": True}, write, packs=False, codes=True)


def torchao(kind: str) -> Example:
    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        if kind == "float8":
            factors = weight.abs().amax(1, keepdim=True) / 448
            narrow = (weight / factors).to(torch.float8_e4m3fn)
            return {"_weight_qdata": narrow, "_weight_scale": factors}, narrow.double() * factors.double()
        if kind == "int8":
            integers, scales, zeros = rounded(weight, 8, weight.shape[1], symmetric=True)
            zero = {"_weight_zero_point": (zeros - 128).to(torch.int8)}
            stored = {"_weight_qdata": (integers - 128).to(torch.int8), "_weight_scale": scales, **zero}
            return stored, value(integers, scales, zeros)
        integers, scales, zeros = rounded(weight, 4, 32, symmetric=False)
        exact = value(integers, scales, zeros)
        if kind == "intx":
            signed = {"_weight_qdata": (integers - 8).to(torch.int8), "_weight_zero_point": (zeros - 8).to(torch.int8)}
            return {**signed, "_weight_scale": scales}, exact
        signed = {"_weight_qdata": pairs((integers - 8) & 15).view(torch.int8), "_weight_scale": scales.T.contiguous()}
        return {**signed, "_weight_zero_point": ((8 - zeros) * scales).T.contiguous()}, exact

    kinds = {"intx": "IntxWeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}
    default = {"_type": kinds[kind]} if kind in kinds else {}
    return Example(
        {"quant_method": "torchao", "quant_type": {"default": default}},
        write,
        packs=kind != "float8",
        codes=kind == "float8",
    )


def hqq(bits: int, group: int, axis: int = 1) -> Example:
    packing, parts, width = {
        8: ("8bit_u8", 1, 8),
        4: ("4bit_u8", 2, 4),
        3: ("3bit_32", 10, 3),
        2: ("2bit_u8", 4, 2),
        1: ("1bit_u8", 8, 1),
    }[bits]

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        grouped = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
        scale = ((high - low) / ((1 << bits) - 1)).clamp_min(1e-4).half()
        zero = (-low / scale.float()).half()
        integers = (grouped / scale.float() + zero.float()).round().clamp(0, (1 << bits) - 1).long()
        exact = ((integers.double() - zero.double()) * scale.double()).view(weight.shape)
        rows = torch.nn.functional.pad(integers, (0, 0, 0, -len(integers) % parts)).view(parts, -1, integers.shape[1])
        shifts = [width * (parts - 1 - i) for i in range(parts)]
        packed = sum(part << shift for part, shift in zip(rows, shifts, strict=True))
        stored = {
            "W_q": packed.to(torch.int32 if bits == 3 else torch.uint8),
            "scale": scale,
            "zero": zero,
            "nbits": torch.tensor(bits, dtype=torch.int32),
            "group_size": torch.tensor(group, dtype=torch.int32),
            "axis": torch.tensor(axis, dtype=torch.int32),
            "shape": torch.tensor(weight.shape),
            "packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
        }
        return stored, exact

    return Example({"quant_method": "hqq"}, write, packs=axis == 1 and group % 32 == 0)


EXAMPLES: dict[str, Example] = {
    **{f"gptq-{bits}": gptq(bits, 32) for bits in (2, 3, 4, 8)},
    "gptq-4-asymmetric": gptq(4, 32, symmetric=False),
    "gptq-4-v2": gptq(4, 64, version=2, symmetric=False),
    "gptq-4-whole": gptq(4, -1),
    "gptq-4-act-order": gptq(4, 32, act_order=True),
    "gptq-3-act-order": gptq(3, 32, act_order=True, symmetric=False),
    "awq-gemm": awq(32, "gemm"),
    "awq-gemv": awq(64, "gemv"),
    "auto-round": Example(
        {**gptq(4, 32).settings, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
        gptq(4, 32).write,
    ),
    "w4a16": packed_integers(4, 32),
    "w4a16-asymmetric": packed_integers(4, 32, symmetric=False),
    "w4a16-act-order": packed_integers(4, 32, act_order=True),
    "w3a16": packed_integers(3, 32),
    "w8a16": packed_integers(8, 64),
    "w8a8": int8(),
    "w8a8-asymmetric": int8(asymmetric=True),
    "bnb-int8": bnb_int8(),
    "bnb-nf4": bnb("nf4", nested=False),
    "bnb-fp4-nested": bnb("fp4", nested=True),
    "fp8-tensor": fp8("tensor"),
    "fp8-channel": fp8("channel"),
    "fp8-tiles": fp8("tiles"),
    "fp8-e5m2": fp8("channel", torch.float8_e5m2),
    "fp8-compressed": fp8("channel", method="compressed-tensors"),
    "fp8-compressed-tiles": fp8("tiles", method="compressed-tensors"),
    "fp8-modelopt": fp8("tensor", method="modelopt"),
    "fp8-static": fp8("tensor", static=True),
    "fp8-compressed-static": fp8("channel", method="compressed-tensors", static=True),
    "fp8-modelopt-static": fp8("tensor", method="modelopt", static=True),
    "nvfp4": nvfp4("compressed-tensors"),
    "nvfp4-modelopt": nvfp4("modelopt"),
    "mxfp4": mx(4),
    "mxfp8": mx(8),
    **{f"hqq-{bits}": hqq(bits, 32) for bits in (1, 2, 3, 4, 8)},
    "hqq-4-columns": hqq(4, 32, axis=0),
    **{f"torchao-{kind}": torchao(kind) for kind in ("float8", "int8", "intx", "int4")},
}


def mxfp4_experts(experts: int, outputs: int, inputs: int) -> tuple[Stored, Tensor]:
    """gpt-oss's: `_blocks` and `_scales` of [E, outputs, inputs], and the values as [E, inputs, outputs]."""
    grouped = torch.randn(experts, outputs, inputs // 32, 32)
    exponents = powers(grouped, 6.0)
    factors = torch.exp2(exponents.double() - 127)[..., None]
    codes = e2m1(grouped / factors.float())
    exact = (e2m1_values(codes) * factors).flatten(2).transpose(1, 2)
    return {"_blocks": pairs(codes), "_scales": exponents}, exact


def size_of(stored: Stored) -> int:
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in stored.values())


def blocks_of(bits: int, group: int, minima: bool, outputs: int, inputs: int) -> QuantizedBlocks:
    """A random matrix; `group` 0: all inputs share a scale."""
    size = group or inputs

    def grouped(values: Tensor) -> Tensor:
        return values.half().repeat_interleave(size // min(size, 32), 1)

    middle = 1 << (bits - 1)
    values = torch.randint(0, 2 * middle, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs, inputs // size) + 0.5) / (middle * inputs**0.5)
    least = torch.randn(outputs, inputs // size) * 0.2 / inputs**0.5
    return QuantizedBlocks(values, grouped(scales), grouped(least) if minima else None, middle, bits)


_NF4 = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0)
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
BNB_TABLES = {
    "nf4": torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, *_NF4]),
    "fp4": torch.tensor([*_FP4, *(-number for number in _FP4)]),
}
"""About the tables of bitsandbytes: NF4, and FP4 (https://arxiv.org/abs/2305.14314)."""


def codes_of(kind: str, group: int, outputs: int, inputs: int) -> QuantizedBlocks:
    """A random matrix of codes: in a random table of 16 numbers that float16 has, or in 8-bit floats."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}.get(kind)
    table = torch.randn(16).sign() * (torch.rand(16) + 0.01)
    book = Codebook("table", table) if dtype is None else FLOATS[dtype]
    values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if dtype is not None:
        spread = torch.randn(outputs, inputs) * torch.exp2(torch.randint(-12, 6, (outputs, inputs)))
        values = spread.to(dtype).view(torch.uint8)
    scales = (torch.rand(outputs, inputs // (group or inputs)) + 0.5) / inputs**0.5
    return QuantizedBlocks(values, scales, None, 0, book.bits, book=book)


def value_of(blocks: QuantizedBlocks) -> Tensor:
    """Its values in float64."""
    size = blocks.values.shape[1] // blocks.scales.shape[1]
    scales = blocks.scales.double().repeat_interleave(size, 1)
    least = 0.0 if blocks.minima is None else blocks.minima.double().repeat_interleave(size, 1)
    numbers = blocks.values if blocks.book is None else blocks.book.of(blocks.values)
    return (numbers.double() - blocks.zero_point) * scales + least
