"""Dequantization of ggml's block formats (layouts: `ggml-common.h` and `ggml-quants.c` of llama.cpp).

The common formats are decoded here with torch, in pieces that fit the processor's cache; the rest by the `gguf`
library. All arithmetic is float32, in the library's order, so both agree exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from octavo.models.load.quantized.floats import from_e8m0
from octavo.nn.weights import E2M1, Codebook, QuantizedBlocks

_PIECE = 1 << 19

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize(raw: Tensor, kind: GGMLQuantizationType, dtype: torch.dtype) -> Tensor:
    """Return a tensor's values.

    Args:
        raw: uint8, contiguous, whole blocks.
        dtype: of the result; plain formats are returned in their own dtype, as a view of `raw`.

    Returns:
        One-dimensional.
    """
    if kind in _PLAIN:
        return raw.view(-1).view(_PLAIN[kind])
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    out = torch.empty(blocks.shape[0], per_block, dtype=dtype)
    decode = _DECODERS.get(kind) or _by_library(kind)
    step = max(1, _PIECE // per_block)
    for start in range(0, blocks.shape[0], step):
        piece = blocks[start : start + step]
        out[start : start + step] = decode(piece).view(piece.shape[0], per_block)
    return out.view(-1)


def as_blocks(raw: Tensor, kind: GGMLQuantizationType) -> QuantizedBlocks | None:
    """Convert to a matrix of integers in blocks of 32, or of codes, without intermediate floats; None if the format
    does not fit.

    Args:
        raw: uint8 [N, bytes], contiguous, whole blocks.
    """
    rows, blocks = raw.shape[0], raw.reshape(-1, GGML_QUANT_SIZES[kind][1])
    if kind in CODES:
        codes, scales, minima, book = CODES[kind](blocks)
        minima = None if minima is None else minima.reshape(rows, -1)
        codes, scales = codes.reshape(rows, -1), scales.reshape(rows, -1)
        return QuantizedBlocks(codes, scales, minima, 0, book.bits, book=book)
    if kind not in INTEGERS:
        return None
    values, scales, minima, zero_point, bits = INTEGERS[kind](blocks)
    return QuantizedBlocks(
        values.reshape(rows, -1),
        scales.to(torch.float16).reshape(rows, -1),
        None if minima is None else minima.to(torch.float16).reshape(rows, -1),
        zero_point,
        bits,
    )


def _by_library(kind: GGMLQuantizationType) -> Callable[[Tensor], Tensor]:
    return lambda blocks: torch.from_numpy(quants.dequantize(blocks.numpy(), kind))


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return [n, 1] float32 from the float16 at a byte offset of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Unpack [n, ..., w] bytes to [n, ..., 2, w]: all low halves, then all high ones."""
    return torch.stack([packed & 15, packed >> 4], dim=-2)


def _fifth_bits(bits: Tensor) -> Tensor:
    """Unpack four bytes [n, 4] to [n, 2, 16]: bit j of the little-endian word, as 0 or 16, for value j."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((bits[:, :, None] >> shifts) & 1) << 4).view(-1, 2, 16)


def _q4_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 2:]).view(-1, 32).float().sub_(8)
    return values.mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 4:]).view(-1, 32).float()
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return values.view(-1, 32).float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return values.view(-1, 32).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return d * scale and dmin * minimum, [n, 8] each. Twelve bytes hold eight 6-bit scales and eight 6-bit minima."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float().mul_(_half(blocks, 0)), minima.float().mul_(_half(blocks, 2))


def _with_scales_and_minima(values: Tensor, blocks: Tensor) -> Tensor:
    """Return d * scale * value - dmin * minimum for values [n, 8, 32] float32."""
    scales, minima = _scales_and_minima(blocks)
    return values.mul_(scales[:, :, None]).sub_(minima[:, :, None])


def _q4_k_values(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 16:].unflatten(1, (4, 32)))


def _q5_k_values(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32).bitwise_or_(fifth)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_scales_and_minima(_q4_k_values(blocks).view(-1, 8, 32).float(), blocks)


def _q5_k(blocks: Tensor) -> Tensor:
    return _with_scales_and_minima(_q5_k_values(blocks).float(), blocks)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3) << 4
    values = low.view(-1, 16, 16).bitwise_or_(high.view(-1, 16, 16)).float().sub_(32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    return values.mul_(scales[:, :, None])


_Integers = tuple[Tensor, Tensor, Tensor | None, int, int]


def _centred(values: Tensor, scales: Tensor, minima: Tensor, middle: int, bits: int) -> _Integers:
    """Rewrite scale * value + minimum as scale * (value - middle) + a smaller minimum."""
    return values, scales, minima + scales * middle, middle, bits


def _q4_k_integers(blocks: Tensor) -> _Integers:
    scales, minima = _scales_and_minima(blocks)
    return _centred(_q4_k_values(blocks), scales, minima.neg_(), 8, 4)


def _q5_k_integers(blocks: Tensor) -> _Integers:
    scales, minima = _scales_and_minima(blocks)
    return _centred(_q5_k_values(blocks), scales, minima.neg_(), 16, 8)


INTEGERS: dict[GGMLQuantizationType, Callable[[Tensor], _Integers]] = {
    GGMLQuantizationType.Q4_0: lambda b: (_nibbles(b[:, 2:]), _half(b, 0), None, 8, 4),
    GGMLQuantizationType.Q4_1: lambda b: _centred(_nibbles(b[:, 4:]), _half(b, 0), _half(b, 2), 8, 4),
    GGMLQuantizationType.Q5_0: lambda b: (
        _nibbles(b[:, 6:]).bitwise_or_(_fifth_bits(b[:, 2:6])),
        _half(b, 0),
        None,
        16,
        8,
    ),
    GGMLQuantizationType.Q5_1: lambda b: _centred(
        _nibbles(b[:, 8:]).bitwise_or_(_fifth_bits(b[:, 4:8])),
        _half(b, 0),
        _half(b, 2),
        16,
        8,
    ),
    GGMLQuantizationType.Q8_0: lambda b: (b[:, 2:] ^ 0x80, _half(b, 0), None, 128, 8),
    GGMLQuantizationType.Q4_K: _q4_k_integers,
    GGMLQuantizationType.Q5_K: _q5_k_integers,
}


_Codes = tuple[Tensor, Tensor, Tensor | None, Codebook]
_NONLINEAR = Codebook("table", torch.tensor(quants.IQ4_NL.kvalues, dtype=torch.float32))
_TWO_BITS = Codebook("table", torch.arange(16, dtype=torch.float32))
_THREE_BITS = Codebook("table", torch.arange(16, dtype=torch.float32) - 4)
_SIX_BITS = Codebook("integers", torch.arange(64, dtype=torch.float32) - 32)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """Unpack [n, w, 32] bytes to [n, w, 8 / bits, 32]: their lowest fields first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return packed[:, :, None] >> shifts & ((1 << bits) - 1)


def _q2_k_codes(blocks: Tensor) -> _Codes:
    packed = blocks[:, :16]
    scales, minima = (packed & 15).float().mul_(_half(blocks, 80)), (packed >> 4).float().mul_(-_half(blocks, 82))
    return _fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2), scales, minima, _TWO_BITS


def _q3_k_codes(blocks: Tensor) -> _Codes:
    low, high = _fields(blocks[:, 32:96].unflatten(1, (2, 32)), 2), _fields(blocks[:, None, :32], 1)
    packed, rest = _nibbles(blocks[:, 96:104]).flatten(1), _fields(blocks[:, None, 104:108], 2).flatten(1)
    scales = (packed | rest << 4).float().sub_(32).mul_(_half(blocks, 108))
    return low | high.view(low.shape) << 2, scales, None, _THREE_BITS


def _q6_k_codes(blocks: Tensor) -> _Codes:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    high = _fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    return low.flatten(1) | high.flatten(1), scales, None, _SIX_BITS


def _iq4_xs_codes(blocks: Tensor) -> _Codes:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)
    scales = (low | high << 4).float().sub_(32).mul_(_half(blocks, 0))
    return _nibbles(blocks[:, 8:].unflatten(1, (8, 16))), scales, None, _NONLINEAR


CODES: dict[GGMLQuantizationType, Callable[[Tensor], _Codes]] = {
    GGMLQuantizationType.Q2_K: _q2_k_codes,
    GGMLQuantizationType.Q3_K: _q3_k_codes,
    GGMLQuantizationType.Q6_K: _q6_k_codes,
    GGMLQuantizationType.IQ4_NL: lambda b: (_nibbles(b[:, 2:]), _half(b, 0), None, _NONLINEAR),
    GGMLQuantizationType.IQ4_XS: _iq4_xs_codes,
    GGMLQuantizationType.MXFP4: lambda b: (_nibbles(b[:, 1:]), from_e8m0(b[:, :1]), None, E2M1),
}

_DECODERS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

EXPANDED = frozenset(
    {
        GGMLQuantizationType.IQ1_S,
        GGMLQuantizationType.IQ1_M,
        GGMLQuantizationType.IQ2_XXS,
        GGMLQuantizationType.IQ2_XS,
        GGMLQuantizationType.IQ2_S,
        GGMLQuantizationType.IQ3_XXS,
        GGMLQuantizationType.IQ3_S,
        GGMLQuantizationType.TQ1_0,
        GGMLQuantizationType.TQ2_0,
    }
)
"""Formats that no kernel multiplies with."""

SUPPORTED: frozenset[GGMLQuantizationType] = frozenset({*_PLAIN, *_DECODERS, *CODES, *EXPANDED})
