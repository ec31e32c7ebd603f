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
_SCALE = 4
"""Bytes of a scale, at most."""


@dataclass(frozen=True, slots=True)
class Online:
    """A way to quantize matrices.

    Attributes:
        round: matrices [N, K] with the same inputs -> numbers and scales of all their outputs.
        multiple: number that must divide outputs and inputs.
        bits: of a number.
        group: inputs that share a scale, if they divide; None for all.
    """

    round: Callable[[Sequence[Tensor]], list[QuantizedBlocks] | Floats]
    multiple: int
    bits: int = 8
    group: int | None = None

    def kept_bytes(self, shape: Sequence[int]) -> int | None:
        """Return at most how many bytes a matrix [N, K] takes; None if it can't be quantized so."""
        if len(shape) != 2 or any(size % self.multiple for size in shape):
            return None
        outputs, inputs = shape
        groups = inputs // self.group_of(inputs)
        return outputs * (inputs * self.bits // 8 + _SCALE * groups)

    def pack(self, weights: Sequence[Tensor]) -> Words | Fragments | Floats:
        """Return matrices [N, K] with the same inputs as one packed matrix of all their outputs."""
        made = self.round(weights)
        if isinstance(made, Floats):
            return made
        return pack_integers(made, weights[0].device, weights[0].dtype, self.group_of(weights[0].shape[1]))

    def group_of(self, inputs: int) -> int:
        """Return how many of a matrix's inputs share a scale."""
        return _size(inputs, self.group)

    def fits(self, weight: Tensor) -> bool:
        """Return whether a matrix can be quantized so; others stay as they are."""
        return self.kept_bytes(weight.shape) is not None


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Return matrices as one, which takes fewer launches to round; outputs are rounded on their own."""
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def _size(inputs: int, group: int | None) -> int:
    size = group or inputs
    return size if inputs % size == 0 else _BLOCK


def _integers(bits: int, group: int | None) -> Online:
    return Online(
        lambda weights: [_rounded(_joined(weights), bits, _size(weights[0].shape[1], group))],
        _BLOCK,
        bits,
        group,
    )


def _rounded(weight: Tensor, bits: int, group: int) -> QuantizedBlocks:
    """Round a matrix [N, K] to integers around 0, with a scale for each `group` inputs."""
    middle = 1 << (bits - 1)
    grouped = weight.float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2, keepdim=True) / (middle - 0.5)).clamp_min(2.0**-14).half()
    values = (grouped / scales.float() + middle).round().clamp(0, 2 * middle - 1).to(torch.uint8)
    repeated = scales[:, :, 0].repeat_interleave(grouped.shape[2] // _BLOCK, 1)
    return QuantizedBlocks(values.flatten(1), repeated, None, middle, bits)


ONLINE: dict[str, Online] = {
    "fp8": Online(lambda weights: floats.rounded(_joined(weights), floats.DTYPE), 16),
    "w8a8": Online(lambda weights: floats.rounded(_joined(weights), torch.int8), 16),
    "w8a16": _integers(8, None),
    "w4a16": _integers(4, _GROUP),
}
"""Value of --quantization -> how."""
