"""Matrices of small integers with a scale for each group of inputs, as most methods of quantization store them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.nn.weights import QuantizedBlocks

_BLOCK = 32
_LEAST, _MOST = 2.0**-14, 65504.0  # of float16's normal numbers


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix [N, K]: value = scale * (integer - zero point), with a scale and a zero point per group of inputs.

    Attributes:
        values: [N, K] uint8, below 2 ** bits.
        scales: [N, G] float.
        zeros: [N, G], of any dtype.
        groups: [K] int64: each input's group; None if each group is K / G adjacent inputs.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    groups: Tensor | None = None

    def dequantized(self) -> Tensor:
        """Return the values, [N, K] float32."""
        scales, zeros = self._per_input(self.scales.float()), self._per_input(self.zeros.float())
        return (self.values.float() - zeros).mul_(scales)

    def of_outputs(self, outputs: slice) -> Integers:
        """Return some rows of the matrix."""
        return replace(self, values=self.values[outputs], scales=self.scales[outputs], zeros=self.zeros[outputs])

    def blocks(self) -> QuantizedBlocks | None:
        """Return the matrix in the CPU kernels' blocks of 32 inputs; None if they can't represent it.

        Inputs that are assigned to groups are sorted by them, so that each block has one scale. A scale becomes
        float16, and a zero point other than the middle of the integers' range a minimum in float16.
        """
        columns, size = self.values.shape[1], self.values.shape[1] // self.scales.shape[1]
        if columns % _BLOCK or columns % self.scales.shape[1] or size % _BLOCK or not _fits(self.scales):
            return None
        order = None if self.groups is None else torch.argsort(self.groups, stable=True)
        if self.groups is not None and bool((self.groups.bincount(minlength=self.scales.shape[1]) != size).any()):
            return None
        bits = 4 if self.bits <= 4 else 8
        middle, scales, zeros = 1 << (bits - 1), self.scales.float(), self.zeros.float()
        # Fewer bits than the container's: integers are moved so that their own middle becomes the container's.
        shift = middle - (1 << (self.bits - 1))
        minima = scales * (middle - shift - zeros)
        repeats = size // _BLOCK
        values = self.values if order is None else self.values[:, order]
        return QuantizedBlocks(
            values + shift,
            scales.half().repeat_interleave(repeats, 1),
            minima.half().repeat_interleave(repeats, 1) if minima.any() else None,
            middle,
            bits,
            None if order is None else order.int(),
        )

    def _per_input(self, grouped: Tensor) -> Tensor:
        if self.groups is not None:
            return grouped[:, self.groups]
        return grouped.repeat_interleave(self.values.shape[1] // grouped.shape[1], 1)


def _fits(scales: Tensor) -> bool:
    """Return whether float16 has these scales with its full precision."""
    sizes = scales.float().abs()
    return bool(((sizes == 0) | ((sizes >= _LEAST) & (sizes <= _MOST))).all())


def unpack(words: Tensor, bits: int, count: int | None = None) -> Tensor:
    """Return the integers in words [R, C] of 32 bits, as [R, count] uint8. The default count is all complete integers.

    The words of a row are one stream of bits, least significant first. So 3-bit integers may begin in one word and end
    in the next.
    """
    count = words.shape[1] * 32 // bits if count is None else count
    # `contiguous` may keep another stride of a single column.
    words = words.contiguous() if words.stride(1) == 1 else words.clone(memory_format=torch.contiguous_format)
    stream = words.view(torch.uint8)
    if bits == 8:
        integers = stream
    elif 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        integers = (stream[..., None] >> shifts & ((1 << bits) - 1)).flatten(1)
    else:
        ones = (stream[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
        places = torch.arange(bits, dtype=torch.uint8)
        integers = (ones[:, : count * bits].unflatten(1, (-1, bits)) << places).sum(-1, dtype=torch.uint8)
    return integers[:, :count]
