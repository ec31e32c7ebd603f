"""The interface between layers and the loader, which walks the model and pulls the tensors that each layer needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of 16 bits, which the CPU kernels widen to float32 in registers."""
Index = tuple[slice, ...]
"""A part of a tensor: a slice of each dimension."""
InputScale = Callable[[], float]
"""Reads the number by which a checkpoint divides a matrix's inputs before they are rounded to 8 bits.

It is read by the layers that round, so that a flawed one is no error for others. Raises ModelFileError: it is missing,
or not one positive finite number.
"""
_DIVISOR = 32


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a checkpoint stores it.

    Attributes:
        shape: as stored, so packed formats count stored elements.
        dtype: wanted by the layer; a floating-point tensor of another dtype is converted.
        may_be_narrow: a tensor stored in bfloat16 or float16 may be delivered as it is, though `dtype` is wider.
        out_dim, in_dim: the dimension of the layer's outputs or inputs; None if the tensor has none. A shard of the
            layer is a range of that dimension, with any packing.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    out_dim: int | None = None
    in_dim: int | None = None
    may_be_narrow: bool = False

    def converted(self, tensor: Tensor) -> Tensor:
        """Return a stored tensor in the wanted dtype."""
        return tensor if self.may_be_narrow and tensor.dtype in NARROW else tensor.to(self.dtype)


@dataclass(frozen=True, slots=True)
class Codebook:
    """The numbers that codes of 4, 6 or 8 bits stand for.

    Attributes:
        kind: how kernels find a number: in a table of 16, as an integer from the first number on (6 bits), or as a
            float of 8 bits (https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8).
        numbers: [2 ** bits] float32, in the order of the codes.
    """

    kind: Literal["table", "integers", "e4m3", "e5m2"]
    numbers: Tensor

    @property
    def bits(self) -> int:
        return len(self.numbers).bit_length() - 1

    def of(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, in float32."""
        return self.numbers[codes.int()]

    def same(self, other: Codebook) -> bool:
        """Return whether codes stand for the same numbers; not-a-number equals itself."""
        return self.kind == other.kind and torch.equal(self.numbers.nan_to_num(), other.numbers.nan_to_num())


_POSITIVE_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = Codebook("table", torch.tensor([*_POSITIVE_E2M1, *(-number for number in _POSITIVE_E2M1)]))
"""Floats of 4 bits: OCP Microscaling Formats, version 1.0, 5.3.3."""


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A matrix [N, K] of unsigned integers in blocks of 32 along K: value = scale * (integer - zero point) + minimum.

    The zero point is the middle of the integers' range, so that minima, if the format has them, are small. With a
    codebook, value = scale * number of the code + minimum, blocks have any size that 16 divides, and scales and minima
    are float32.

    Attributes:
        values: [N, K] uint8, below 2 ** bits.
        scales: [N, K / 32] float16.
        minima: [N, K / 32] float16, or None if all are 0.
        order: [K] int32: column i is for input order[i]; None if that is i.
        book: the numbers of codes; None for integers.
        input_scale: of all inputs; None if the checkpoint has none.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None
    zero_point: int
    bits: int
    order: Tensor | None = None
    book: Codebook | None = None
    input_scale: InputScale | None = None

    @property
    def _size(self) -> int:
        """Inputs of a block."""
        return self.values.shape[1] // self.scales.shape[1]

    def divides(self, index: Index) -> bool:
        """Return whether `part` can be taken: inputs are divided between blocks only, or blocks of all inputs into
        multiples of 32, and if they are in order."""
        size = self._size if self.scales.shape[1] > 1 else min(self._size, _DIVISOR)
        begin, end, _ = index[1].indices(self.values.shape[1])
        return not begin % size and not end % size and (self.order is None or end - begin == self.values.shape[1])

    def part(self, index: Index) -> QuantizedBlocks:
        """Return the outputs and inputs of an index that divides the matrix."""
        outputs, inputs = index
        size = self._size
        begin, end, _ = inputs.indices(self.values.shape[1])
        if not self.divides(index):
            raise ValueError(f"inputs {begin} to {end} don't begin and end with blocks of {size}")
        groups = slice(begin // size, -(-end // size))
        minima = None if self.minima is None else self.minima[outputs, groups]
        return replace(self, values=self.values[outputs, begin:end], scales=self.scales[outputs, groups], minima=minima)

    def with_columns(self, columns: Sequence[int]) -> QuantizedBlocks | None:
        """Return the matrix of these columns, a permutation of all; None if that would take blocks apart."""
        size = self._size
        wanted = torch.tensor(columns).view(-1, size)
        blocks = wanted[:, 0] // size
        if self.order is not None or not torch.equal(wanted, blocks[:, None] * size + torch.arange(size)):
            return None
        minima = None if self.minima is None else self.minima[:, blocks]
        return replace(self, values=self.values[:, wanted.flatten()], scales=self.scales[:, blocks], minima=minima)


def part_of(blocks: QuantizedBlocks | None, index: Index | None) -> QuantizedBlocks | None:
    """Return the part of a matrix; None if there is none, or it can't be divided there."""
    if blocks is None or index is None:
        return blocks
    return blocks.part(index) if blocks.divides(index) else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor that a layer needs from a checkpoint, by its full name.

    Attributes:
        optional: it may be missing.
        blocks: quantized weights may be delivered as `QuantizedBlocks`.
        codes: also those with a codebook.
        index: the part of the stored tensor that this rank needs; None for all.
    """

    name: str
    spec: TensorSpec
    optional: bool = False
    blocks: bool = False
    codes: bool = False
    index: Index | None = None


Stored = Tensor | QuantizedBlocks
"""A tensor of a checkpoint, or a quantized matrix that was wanted as `QuantizedBlocks`."""


def plain(stored: Stored | None) -> Tensor:
    """Return a tensor that was not wanted as `QuantizedBlocks` and is not optional."""
    assert isinstance(stored, Tensor), "the layer needs a plain tensor"
    return stored


class WeightLayer(nn.Module, ABC):
    """A module with weights. It holds no tensor before `place`, so building a model takes no memory.

    Attributes:
        path: its place in the model, in the checkpoint's names.
        device: device of its tensors.
        superseded: checkpoint names that this layer makes redundant; no warning if they are not read.
        offloaded: its tensors have their values only while the model computes it (`worker/offload.py`).
    """

    superseded: tuple[str, ...] = ()
    offloaded = False

    @property
    def source(self) -> WeightLayer | None:
        """The layer whose tensors this one shares, if any. This layer is then placed right after it, without
        tensors."""
        return None

    def __init__(self, path: str, device: torch.device) -> None:
        super().__init__()
        self.path = path
        self.device = device

    @property
    def holders(self) -> tuple[object, ...]:
        """The objects among whose attributes are the placed tensors."""
        return (self,)

    def replaced(self) -> None:
        """Use the holders' tensors, after they were replaced by others."""

    @abstractmethod
    def wanted(self) -> list[Wanted]:
        """Return the tensors to fetch, in the order that `place` expects."""

    @abstractmethod
    def place(self, tensors: Sequence[Stored | None]) -> None:
        """Take the tensors, already of the wanted shape and dtype and on the layer's device; None for absent ones,
        `QuantizedBlocks` for those wanted so.

        They may be views into a mapped file, so a layer must keep copies only.
        """

    def fill(self, fetch: Callable[[Wanted], Stored | None]) -> None:
        """Fetch all wanted tensors and place them. A layer of many tensors overrides it to hold few at a time."""
        self.place([fetch(want) for want in self.wanted()])

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the placed tensors, without those shared with another layer."""


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Return the sum of the tensors' sizes in bytes, opaque layouts included."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


Keep = Callable[[Sequence[Tensor]], Tensor]
"""Stores a matrix given in parts: `fused`, or the same in other memory."""


def fused(parts: Sequence[Tensor]) -> Tensor:
    """Return the parts concatenated along rows, contiguous and independent of any mapped file."""
    return owned(parts[0]) if len(parts) == 1 else torch.cat(list(parts))


def owned(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous and independent of any mapped file. One on an accelerator is a copy already."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor.device.type == "cpu" else tensor.contiguous()
