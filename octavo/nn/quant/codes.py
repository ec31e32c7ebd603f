"""Matrices of codes (`Codebook`) in the layout of the CPU kernels; see native/src/codes.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype
from octavo.nn.quant.panels import PANEL, columns_of
from octavo.nn.weights import Codebook, QuantizedBlocks

DTYPES = {"table": Dtype.CODE4, "integers": Dtype.CODE6, "e4m3": Dtype.E4M3, "e5m2": Dtype.E5M2}
LEAST_GROUP = 16
"""Each number of inputs that share a scale is a multiple of this."""
_UNITS = {"e4m3": 256.0}
"""The kernels read codes as float16: kind -> a number divided by what its code is there."""
_LARGEST = 14
"""Exponent of the largest scale in float16; smaller ones keep their precision down to 2 ** -14."""
_MIDDLE = 32  # zero point of integers of 6 bits
INTEGERS = Codebook("integers", torch.arange(-_MIDDLE, _MIDDLE, dtype=torch.float32))
_SLICE = 2048  # rows packed at a time, to limit temporary memory


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of codes for the kernels.

    Attributes:
        panels: those of each part.
        book: float32: the factor of all scales, and the codes' numbers as the kernels read them.
        group: inputs that share a scale.
    """

    panels: list[Tensor]
    book: Tensor
    group: int
    dtype: Dtype


def unified(parts: Sequence[QuantizedBlocks]) -> list[QuantizedBlocks] | None:
    """Return parts, at least one with a codebook, in one form; None if there is none that has all values.

    Integers of up to 6 bits become codes beside codes that are integers: llama.cpp stores some projections of a layer
    with more bits than others.
    """
    coded = [part if part.book is not None else _as_codes(part) for part in parts]
    found = [part for part in coded if part is not None]
    if len(found) < len(parts):
        return None
    first = found[0].book
    assert first is not None, "all parts have codes by now"
    if not all(part.book is not None and part.book.same(first) for part in found):
        return None
    inputs = found[0].values.shape[1]
    group = math.gcd(*(inputs // part.scales.shape[1] for part in found))
    if group % LEAST_GROUP:
        return None
    has_minima = any(part.minima is not None for part in found)
    return [_in_groups(part, inputs // group, has_minima=has_minima) for part in found]


def pack_codes(parts: Sequence[QuantizedBlocks]) -> Packed:
    """Pack parts in one form, with a codebook: [ceil(N / 16), K / group, record] uint8 each."""
    first = parts[0]
    book = first.book
    assert book is not None, "integers have no codes"
    unit = _UNITS.get(book.kind, 1.0)
    largest = max(_largest(part) for part in parts)
    factor = 2.0 ** (math.floor(math.log2(largest)) - _LARGEST) if largest else 1.0
    numbers = (book.numbers / unit).half().float()
    return Packed(
        [_panels(part, factor) for part in parts],
        torch.cat([torch.tensor([factor * unit]), numbers]),
        first.values.shape[1] // first.scales.shape[1],
        DTYPES[book.kind],
    )


def _largest(part: QuantizedBlocks) -> float:
    both = [part.scales] if part.minima is None else [part.scales, part.minima]
    return max(float(tensor.abs().max()) for tensor in both)


def _panels(part: QuantizedBlocks, factor: float) -> Tensor:
    assert part.book is not None, "integers have no codes"
    rows, columns = part.values.shape
    groups, halves = part.scales.shape[1], 1 if part.minima is None else 2
    record = PANEL * (columns // groups * part.book.bits // 8 + 2 * halves)
    packed = torch.empty(-(-rows // PANEL), groups, record, dtype=torch.uint8)
    unit = _UNITS.get(part.book.kind, 1.0)
    for first in range(0, rows, _SLICE):
        cut = slice(first, first + _SLICE)
        codes = F.pad(part.values[cut], (0, 0, 0, -part.values[cut].shape[0] % PANEL))
        codes = codes.view(-1, PANEL, groups, columns // groups).permute(0, 2, 3, 1)  # [panel, group, input, column]
        ends = [columns_of((part.scales[cut] / factor).half())]
        if part.minima is not None:
            ends.append(columns_of((part.minima[cut] / (factor * unit)).half()))
        packed[first // PANEL : first // PANEL + codes.shape[0]] = torch.cat([_stored(codes, part.book.bits), *ends], 2)
    return packed


def _stored(codes: Tensor, bits: int) -> Tensor:
    """Return the bytes of codes [P, G, inputs, 16], [P, G, bytes]."""
    if bits == 8:
        return codes.flatten(2)
    fours = codes.unflatten(2, (-1, 4))  # [panel, group, four, input, column]
    # [..., two inputs, input, half of columns, quarter, column] to [..., two inputs, quarter, input, half, column]
    placed = fours.unflatten(4, (2, 2, 4)).unflatten(3, (2, 2)).permute(0, 1, 2, 3, 6, 4, 5, 7).flatten(4)
    first, second = placed[:, :, :, 0], placed[:, :, :, 1]
    low: Tensor = first & 15 | second << 4
    if bits == 4:
        return low.flatten(2)
    high = (first >> 4 | second >> 4 << 2).unflatten(3, (2, PANEL))
    return torch.cat([low, high[:, :, :, 0] | high[:, :, :, 1] << 4], 3).flatten(2)


def _as_codes(part: QuantizedBlocks) -> QuantizedBlocks | None:
    """Return integers of up to 6 bits as codes."""
    shift = _MIDDLE - part.zero_point
    if part.order is not None or shift < 0 or int(part.values.max()) + shift >= 2 * _MIDDLE:
        return None
    minima = None if part.minima is None else part.minima.float()
    return replace(
        part,
        values=part.values + shift,
        scales=part.scales.float(),
        minima=minima,
        zero_point=0,
        bits=INTEGERS.bits,
        book=INTEGERS,
    )


def _in_groups(part: QuantizedBlocks, groups: int, *, has_minima: bool) -> QuantizedBlocks:
    """Return codes with scales for as many groups, a multiple of theirs."""
    repeats = groups // part.scales.shape[1]
    scales = part.scales.repeat_interleave(repeats, 1)
    minima = None if part.minima is None else part.minima.repeat_interleave(repeats, 1)
    if has_minima and minima is None:
        minima = torch.zeros_like(scales)
    return replace(part, scales=scales, minima=minima)
