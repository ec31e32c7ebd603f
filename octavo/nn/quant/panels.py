"""Weight matrices in the layout of the CPU kernels: panels of 16 outputs, words of 32 bits (see native/src/tile.h)."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.native.builder import BLOCK
from octavo.nn.weights import QuantizedBlocks

PANEL = 16
FOUR = 4
"""Inputs whose codes are widened at a time."""
_SLICE = 128


def pack(weight: Tensor) -> Tensor:
    """Pack [N, K] float32 or bfloat16 to [ceil(N / 16), K / e, 16, e], with e elements in 32 bits; e must divide K."""
    return pack_(weight.clone())


def pack_(weight: Tensor) -> Tensor:
    """Like `pack`, for a contiguous matrix that is no longer needed: in place if 16 divides N."""
    over = -weight.shape[0] % PANEL
    rows = F.pad(weight, (0, 0, 0, over)) if over else weight
    words, per_word = weight.nbytes // weight.shape[0] // 4, 4 // weight.element_size()
    whole = rows.view(torch.int32)  # torch transposes words three times as fast as pairs of bfloat16
    plain, packed = whole.view(-1, PANEL, words), whole.view(-1, words, PANEL)
    for first in range(0, len(plain), _SLICE):
        cut = slice(first, first + _SLICE)
        packed[cut] = plain[cut].transpose(1, 2).contiguous()
    return rows.view(-1, words, PANEL, per_word)


def pack_halves(weight: Tensor) -> Tensor:
    """Pack [N, K] float16 to [ceil(N / 16), K, 16]."""
    rows = F.pad(weight.view(torch.int16), (0, 0, 0, -weight.shape[0] % PANEL))
    return rows.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """Interleave the panels of two matrices of the same shape."""
    return torch.stack([first, second], dim=1).flatten(0, 1)


def pack_blocks(blocks: QuantizedBlocks) -> Tensor:
    """Pack to [ceil(N / 16), K / 32, record] uint8 (see native/src/blocks.h), in slices to limit temporary memory."""
    rows, columns = blocks.values.shape
    record = PANEL * (BLOCK * blocks.bits // 8 + (2 if blocks.minima is None else 4))
    packed = torch.empty(-(-rows // PANEL), columns // BLOCK, record, dtype=torch.uint8)
    for first in range(0, packed.shape[0], _SLICE):
        cut = slice(first * PANEL, (first + _SLICE) * PANEL)
        minima = None if blocks.minima is None else blocks.minima[cut]
        part = replace(blocks, values=blocks.values[cut], scales=blocks.scales[cut], minima=minima)
        packed[first : first + _SLICE] = _pack_slice(part)
    return packed


def _pack_slice(blocks: QuantizedBlocks) -> Tensor:
    rows = F.pad(blocks.values, (0, 0, 0, -blocks.values.shape[0] % PANEL))
    values = rows.view(-1, PANEL, rows.shape[1] // BLOCK, BLOCK // 4, 4).permute(0, 2, 3, 1, 4)
    if blocks.bits == 4:
        values = values[:, :, 0::2] | values[:, :, 1::2] << 4
    halves = [blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima]
    return torch.cat([values.flatten(2), *map(columns_of, halves)], dim=2)


def columns_of(halves: Tensor) -> Tensor:
    """Convert [N, K / 32] float16 to [ceil(N / 16), K / 32, 32] bytes."""
    padded = F.pad(halves, (0, 0, 0, -halves.shape[0] % PANEL))
    return padded.view(-1, PANEL, halves.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


@overload
def whole_halves(rows: Tensor) -> Tensor: ...
@overload
def whole_halves(rows: None) -> None: ...
def whole_halves(rows: Tensor | None) -> Tensor | None:
    """Return the rows (or values of a bias) of two matrices with zeros after each, so that each has whole panels."""
    if rows is None or rows.shape[0] % (2 * PANEL) == 0:
        return rows
    halves = rows.unflatten(0, (2, -1))
    padding = (0, 0) * (halves.dim() - 2) + (0, -halves.shape[1] % PANEL)
    return F.pad(halves, padding).flatten(0, 1)


def whole_words(weight: Tensor) -> Tensor:
    """Return the matrix with a column of zeros, if its rows would end within a word."""
    return weight if weight.element_size() == 4 or weight.shape[1] % 2 == 0 else F.pad(weight, (0, 1))


def pad_bias(bias: Tensor) -> Tensor:
    """Pad [N] to float32 [ceil(N / 16), 16]."""
    return F.pad(bias.float(), (0, -bias.shape[0] % PANEL)).view(-1, PANEL)
