"""Convert codes, and integers around other zero points, to the integers that a GPU's kernels multiply with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.nn.quant.blocks import alike
from octavo.nn.weights import Codebook, QuantizedBlocks

_BLOCK = 32
_PRECISION = 2.0**-9
"""Largest error of a scale in float16, relative to its output's largest."""


def as_integers(parts: Sequence[QuantizedBlocks], device: torch.device) -> list[QuantizedBlocks] | None:
    """Return parts as integers of one form; None if some have numbers that are no multiples of one by 8-bit integers.

    Args:
        device: where codes are converted.
    """
    made = [_centred(part) if part.book is None else _integers(part, part.book, device) for part in parts]
    found = [part for part in made if part is not None]
    if len(found) < len(parts):
        return None
    groups = max(part.scales.shape[1] for part in found)
    if any(groups % part.scales.shape[1] for part in found):
        return None
    return alike([in_groups(part, groups) for part in found])


def _centred(part: QuantizedBlocks) -> QuantizedBlocks | None:
    """Return integers whose zero point is the middle of their range, as kernels have it; None if 8 bits don't fit."""
    if part.zero_point == 1 << (part.bits - 1):
        return part
    least, most = (value - part.zero_point for value in map(int, part.values.aminmax()))
    for bits in (part.bits, 8):
        middle = 1 << (bits - 1)
        if -middle <= least and most < middle:
            moved = (part.values.short() + (middle - part.zero_point)).to(torch.uint8)
            return replace(part, values=moved, zero_point=middle, bits=bits)
    return None


def _integers(part: QuantizedBlocks, book: Codebook, device: torch.device) -> QuantizedBlocks | None:
    """Return codes as integers of 4 bits, or 8, in blocks of at most 32."""
    numbers = book.numbers
    unit = numbers[numbers != 0].abs().min()
    whole = (numbers / unit).round()
    fitting = [bits for bits in (4, 8) if -(1 << (bits - 1)) <= whole.min() and whole.max() < 1 << (bits - 1)]
    inputs, groups = part.values.shape[1], part.scales.shape[1]
    scales = _halved(part.scales * unit)
    minima = None if part.minima is None else _halved(part.minima)
    exact = fitting and torch.equal(whole * unit, numbers)
    if not exact or scales is None or (minima is None and part.minima is not None) or inputs % _BLOCK:
        return None
    bits = fitting[0]
    table = (whole + (1 << (bits - 1))).to(device, torch.uint8)
    made = QuantizedBlocks(table[part.values.to(device).int()], scales, minima, 1 << (bits - 1), bits, part.order)
    return in_groups(made, max(groups, inputs // _BLOCK))


def _halved(factors: Tensor) -> Tensor | None:
    """Return factors [N, G] in float16; None if it lacks their precision."""
    halves = factors.half()
    largest = factors.abs().amax(1)
    close = (halves.float() - factors).abs().amax(1) <= _PRECISION * largest
    return halves if bool(close.all()) else None


def in_groups(part: QuantizedBlocks, groups: int) -> QuantizedBlocks:
    """Return a matrix with scales for as many groups, a multiple of its own."""
    repeats = groups // part.scales.shape[1]
    minima = None if part.minima is None else part.minima.repeat_interleave(repeats, 1)
    return replace(part, scales=part.scales.repeat_interleave(repeats, 1), minima=minima)
