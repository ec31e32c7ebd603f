"""Weights kept as the stored integers; only Octavo's CPU kernels multiply with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.native.bindings import Dtype
from octavo.native.builder import BLOCK
from octavo.nn.quant.base import Part
from octavo.nn.quant.codes import pack_codes, unified
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.panels import FOUR, PANEL, pack_blocks
from octavo.nn.weights import Keep, QuantizedBlocks, Stored, TensorSpec, fused, plain, tensor_bytes

_INTEGERS = {4: Dtype.INT4, 8: Dtype.INT8}
_MIDDLE = 128  # zero point of 8-bit integers
_SLICE = 4096  # rows rounded at a time, to limit temporary memory


class BlockQuantized(Unquantized):
    """A matrix of `QuantizedBlocks` if the checkpoint has one, else a plain matrix: in float32, or in 16 bits if it is
    stored so and activations are float32, since the kernels widen it without a change of its values.

    Attributes:
        packed: the panels of all parts, concatenated; None if the matrix is plain.
        zero_point, has_minima, order: of all parts; see `QuantizedBlocks`.
        form: dtype of the panels.
        book, group: of codes; see `codes.py`.
    """

    takes_blocks = takes_codes = True

    def __init__(self, dtype: torch.dtype, device: torch.device, keep: Keep = fused) -> None:
        super().__init__(dtype, device, keep)
        self.packed: Tensor | None = None
        self.shape = (0, 0)
        self.zero_point = 0
        self.form = Dtype.INT8
        self.has_minima = False
        self.order: Tensor | None = None
        self.book: Tensor | None = None
        self.group = 0

    def stored(self, part: Part) -> dict[str, TensorSpec]:
        specs = super().stored(part)
        narrow = self.dtype is torch.float32 and part.in_features % FOUR == 0
        return {**specs, "weight": replace(specs["weight"], may_be_narrow=narrow)}

    def prepare(self, parts: Sequence[Mapping[str, Stored]]) -> None:
        weights = [part["weight"] for part in parts]
        blocks = [weight for weight in weights if isinstance(weight, QuantizedBlocks)]
        fits = len(blocks) == len(weights) and not blocks[0].values.shape[1] % BLOCK and same_order(blocks)
        matched = alike(blocks) if fits else None
        if matched is None:
            values = [weight if isinstance(weight, Tensor) else dequantized(weight, self.dtype) for weight in weights]
            if len({value.dtype for value in values}) > 1:
                values = [value.to(self.dtype) for value in values]
            super().prepare([{**part, "weight": weight} for part, weight in zip(parts, values, strict=True)])
            return
        self._pack(matched)
        if "bias" in parts[0]:
            self.bias = torch.cat([plain(part["bias"]) for part in parts])

    def share(self, weight: Stored) -> None:
        if isinstance(weight, Tensor):
            super().share(weight)
        else:
            self._pack([weight])

    def _pack(self, blocks: list[QuantizedBlocks]) -> None:
        blocks = joined(blocks)
        first = blocks[0]
        self.shape = (sum(part.values.shape[0] for part in blocks), first.values.shape[1])
        self.zero_point, self.order, self.has_minima = first.zero_point, first.order, first.minima is not None
        if first.book is None:
            self.packed, self.form = self._keep([pack_blocks(part) for part in blocks]), _INTEGERS[first.bits]
            return
        coded = pack_codes(blocks)
        self.packed, self.form = self._keep(coded.panels), coded.dtype
        self.book, self.group = coded.book, coded.group

    @property
    def nbytes(self) -> int:
        return super().nbytes + tensor_bytes(self.packed, self.order, self.book)


class RoundedBlocks(BlockQuantized):
    """Like `BlockQuantized`, but a plain matrix is rounded to 8-bit integers, if its rows divide into blocks."""

    def prepare(self, parts: Sequence[Mapping[str, Stored]]) -> None:
        super().prepare([{**part, "weight": rounded(part["weight"])} for part in parts])

    def share(self, weight: Stored) -> None:
        super().share(rounded(weight))


def rounded(weight: Stored) -> Stored:
    """Return a plain matrix [N, K] as the nearest 8-bit integers with a scale per block; others as they are."""
    if not isinstance(weight, Tensor) or weight.shape[1] % BLOCK:
        return weight
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float16)
    for first in range(0, rows, _SLICE):
        cut = slice(first, first + _SLICE)
        grouped = weight[cut].float().unflatten(1, (-1, BLOCK))
        scales[cut] = grouped.abs().amax(-1) / (_MIDDLE - 1)
        steps = scales[cut].float()
        integers = (grouped / steps.where(steps > 0, 1)[..., None]).round_().clamp_(1 - _MIDDLE, _MIDDLE - 1)
        values[cut] = integers.add_(_MIDDLE).to(torch.uint8).flatten(1)
    return QuantizedBlocks(values, scales, None, _MIDDLE, 8)


def alike(parts: list[QuantizedBlocks]) -> list[QuantizedBlocks] | None:
    """Convert the parts to one format: their common one, else 8 bits with minima, which can represent all integers, or
    codes; None if there is none."""
    if any(part.book is not None for part in parts):
        return unified(parts)
    if len({(part.bits, part.zero_point, part.minima is None) for part in parts}) == 1:
        return parts
    return [
        QuantizedBlocks(
            part.values + (_MIDDLE - part.zero_point),
            part.scales,
            torch.zeros_like(part.scales) if part.minima is None else part.minima,
            _MIDDLE,
            8,
            part.order,
        )
        for part in parts
    ]


def joined(parts: list[QuantizedBlocks]) -> list[QuantizedBlocks]:
    """Return the parts as one if some would end within a panel, which would leave gaps between their outputs.

    Two of one size stay apart: they are a gate and its operand, and each has whole panels.
    """
    rows = [len(part.values) for part in parts]
    if not any(count % PANEL for count in rows[:-1]) or (len(rows) == 2 and rows[0] == rows[1]):
        return parts
    first = parts[0]
    minima = None if first.minima is None else torch.cat([plain(part.minima) for part in parts])
    values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    return [replace(first, values=values, scales=scales, minima=minima)]


def same_order(parts: list[QuantizedBlocks]) -> bool:
    """Return whether all parts read the inputs in one order, so that these are rounded once for all."""
    first = parts[0].order
    return all(
        first is part.order or (first is not None and part.order is not None and torch.equal(first, part.order))
        for part in parts
    )


def dequantized(blocks: QuantizedBlocks, dtype: torch.dtype) -> Tensor:
    """Return the matrix's values, [N, K]."""
    codes = blocks.values.view(*blocks.scales.shape, -1)
    values = codes.float() - blocks.zero_point if blocks.book is None else blocks.book.of(codes)
    values *= blocks.scales.float()[..., None]
    if blocks.minima is not None:
        values += blocks.minima.float()[..., None]
    columns = values.flatten(1).to(dtype)
    return columns if blocks.order is None else torch.empty_like(columns).index_copy_(1, blocks.order.long(), columns)
