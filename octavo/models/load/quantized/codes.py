"""Matrices of codes with a scale for each group of inputs: 4-bit and 8-bit floating point, and tables of 16 numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.nn.weights import Codebook, InputScale, QuantizedBlocks

_BLOCK, _LEAST_GROUP = 32, 16
_BYTES = torch.arange(256, dtype=torch.uint8)
FLOATS = {
    torch.float8_e4m3fn: Codebook("e4m3", _BYTES.view(torch.float8_e4m3fn).float()),
    torch.float8_e5m2: Codebook("e5m2", _BYTES.view(torch.float8_e5m2).float()),
}


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix [N, K]: value = scale * number of the code.

    Attributes:
        codes: [N, K] uint8.
        scales: [N, G] float32: of K / `group` groups, the last one smaller if `group` doesn't divide K.
        group: inputs that share a scale.
        input_scale: as in `QuantizedBlocks`.
    """

    codes: Tensor
    scales: Tensor
    group: int
    book: Codebook
    input_scale: InputScale | None = None

    def dequantized(self) -> Tensor:
        """Return the values, [N, K] float32."""
        scales = self.scales.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]
        return self._numbers().mul_(scales)

    def of_outputs(self, outputs: slice) -> Codes:
        """Return some rows of the matrix."""
        return replace(self, codes=self.codes[outputs], scales=self.scales[outputs])

    def blocks(self) -> QuantizedBlocks | None:
        """Return the matrix for the CPU kernels; None if they can't represent it."""
        inputs = self.codes.shape[1]
        size = math.gcd(self.group, inputs)
        if inputs % _BLOCK or size % _LEAST_GROUP or not self._is_finite():
            return None
        scales = self.scales.repeat_interleave(self.group // size, 1)[:, : inputs // size]
        bits, book = self.book.bits, self.book
        return QuantizedBlocks(self.codes, scales, None, 0, bits, book=book, input_scale=self.input_scale)

    def _numbers(self) -> Tensor:
        dtype = next((dtype for dtype, book in FLOATS.items() if book is self.book), None)
        return self.book.of(self.codes) if dtype is None else self.codes.view(dtype).float()

    def _is_finite(self) -> bool:
        flawed = ~self.book.numbers.isfinite()
        codes_fit = not flawed.any() or not any(bool((self.codes == code).any()) for code in flawed.nonzero().flatten())
        return codes_fit and bool(self.scales.isfinite().all())


def halves(pairs: Tensor) -> Tensor:
    """Return the codes of bytes [..., C], each of two, the first in the low half: [..., 2 * C]."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def coded(codes: Tensor, scales: Tensor, book: Codebook | None = None) -> Codes:
    """Return codes [N, K], or floats of 8 bits, with scales: [] or [1 or N, G], of G equal groups of inputs."""
    outputs, inputs = codes.shape
    if book is None:
        book, codes = FLOATS[codes.dtype], codes.view(torch.uint8)
    scales = scales.float()
    scales = scales.view(1, 1) if scales.dim() == 0 else scales
    groups = scales.shape[1]
    return Codes(codes, scales.expand(outputs, groups), inputs // groups, book)
