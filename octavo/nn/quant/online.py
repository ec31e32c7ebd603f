"""Quantize plain matrices when they are loaded, by rounding to the nearest values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.nn.ops import floats
from octavo.nn.ops.floats import Floats
from octavo.nn.ops.fragments import Fragments
from octavo.nn.ops.words import Words
from octavo.nn.quant.fragments import pack_integers
from octavo.nn.weights import QuantizedBlocks

_BLOCK = 32
_GROUP = 128


@dataclass(frozen=True, slots=True)
class Online:
    """A way to quantize matrices.

    Attributes:
        pack: matrices [N, K] with the same inputs -> one packed matrix of all their outputs.
        multiple: number that must divide outputs and inputs.
    """

    pack: Callable[[Sequence[Tensor]], Words | Fragments | Floats]
    multiple: int

    def fits(self, weight: Tensor) -> bool:
        """Return whether a matrix can be quantized so; others stay as they are."""
        return all(size % self.multiple == 0 for size in weight.shape)


def _floats(dtype: torch.dtype, weights: Sequence[Tensor]) -> Floats:
    parts = [floats.rounded(weight, dtype) for weight in weights]
    return Floats(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def _integers(bits: int, group: int | None, weights: Sequence[Tensor]) -> Words | Fragments:
    inputs = weights[0].shape[1]
    size = group or inputs
    size = size if inputs % size == 0 else _BLOCK
    blocks = [_rounded(weight, bits, size) for weight in weights]
    return pack_integers(blocks, weights[0].device, weights[0].dtype, size)


def _rounded(weight: Tensor, bits: int, group: int) -> QuantizedBlocks:
    """Round a matrix [N, K] to integers around 0, with a scale for each `group` inputs."""
    middle = 1 << (bits - 1)
    grouped = weight.float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2, keepdim=True) / (middle - 0.5)).clamp_min(2.0**-14).half()
    values = (grouped / scales.float() + middle).round().clamp(0, 2 * middle - 1).to(torch.uint8)
    repeated = scales[:, :, 0].repeat_interleave(grouped.shape[2] // _BLOCK, 1)
    return QuantizedBlocks(values.flatten(1), repeated, None, middle, bits)


ONLINE: dict[str, Online] = {
    "fp8": Online(lambda weights: _floats(floats.DTYPE, weights), 16),
    "w8a8": Online(lambda weights: _floats(torch.int8, weights), 16),
    "w8a16": Online(lambda weights: _integers(8, None, weights), _BLOCK),
    "w4a16": Online(lambda weights: _integers(4, _GROUP, weights), _BLOCK),
}
"""Value of --quantization -> how."""
