"""Convert quantized matrices to the 8-bit numbers that `nn/ops/floats.py` multiplies with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.device.transfer import move
from octavo.nn.ops.floats import DTYPE, TILE, Floats
from octavo.nn.weights import QuantizedBlocks

_ALIGNMENT = 16
"""Outputs and inputs are multiples of it, as the library requires."""
_MIDDLE = 128
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def pack_floats(parts: Sequence[QuantizedBlocks], device: torch.device) -> Floats | None:
    """Return parts of one form as one matrix on a device: 8-bit floats with a scale per output or per tile of
    128 x 128, or symmetric 8-bit integers with a scale per output; None for others."""
    first, outputs = parts[0], sum(part.values.shape[0] for part in parts)
    if outputs % _ALIGNMENT or first.values.shape[1] % _ALIGNMENT or first.minima is not None:
        return None
    scales = _integer_scales(parts) if first.book is None else _float_scales(parts)
    if scales is None:
        return None
    codes = torch.cat([move(part.values, device) for part in parts])
    if first.book is None:
        return Floats((codes ^ _MIDDLE).view(torch.int8), scales.to(device))
    return Floats(codes.view(_DTYPES[first.book.kind]), scales.to(device))


def with_input_scale(made: Floats, parts: Sequence[QuantizedBlocks]) -> Floats:
    """Return the matrix of `pack_floats` for rows that are rounded with the checkpoint's scale, if all parts have one,
    numbers are E4M3, and scales of outputs: with the largest, which rounds no part's inputs to infinity.

    Raises:
        ModelFileError: a scale is missing or flawed.
    """
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    if made.codes.dtype != DTYPE or made.tile or len(scales) < len(parts):
        return made
    return made.with_input_scale(max(scale() for scale in scales))


def _integer_scales(parts: Sequence[QuantizedBlocks]) -> Tensor | None:
    """Return the scales [N] of integers; None if they have other forms."""
    first = parts[0]
    if first.bits != 8 or first.zero_point != _MIDDLE or first.order is not None:
        return None
    scales = torch.cat([part.scales for part in parts])
    return scales[:, 0].float().contiguous() if bool((scales == scales[:, :1]).all()) else None


def _float_scales(parts: Sequence[QuantizedBlocks]) -> Tensor | None:
    """Return the scales of floats, as `Floats` has them; None if they have other forms."""
    first = parts[0]
    assert first.book is not None
    if first.book.kind not in _DTYPES:
        return None
    inputs, groups = first.values.shape[1], first.scales.shape[1]
    if groups == 1:
        return torch.cat([part.scales[:, 0] for part in parts]).float()
    if inputs // groups != TILE or any(part.values.shape[0] % TILE for part in parts[:-1]):
        return None
    tiles = []
    for part in parts:
        starts = torch.arange(part.scales.shape[0]) // TILE * TILE
        if not torch.equal(part.scales, part.scales[starts]):
            return None
        tiles.append(part.scales[::TILE])
    return torch.nn.functional.pad(torch.cat(tiles).float(), (0, -groups % 4))
