"""`NativeDelta`: the additions of adapters in a native program; the kernels are in `native/src/low_rank.cpp`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.features.lora.layout import Geometry, Target
from octavo.features.lora.tables import Batch, Tables
from octavo.native.bindings import Dtype, LowRank
from octavo.native.builder import ProgramBuilder
from octavo.native.experts import ExpertAdditions
from octavo.nn.delta import Addition, Delta, ExpertsDelta
from octavo.nn.norm import Norm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.quant.panels import PANEL

_MIN_TILE = 64
"""Bytes that the kernels read at once, which must be in one slice."""


class NativeDelta(Delta):
    """The additions of all adapters to one layer, gains included.

    The kernels read the tables and the batch anew in each step, so a program serves for any adapters.
    """

    def __init__(self, memory: Tensor, tables: Tables, target: Target, index: int, batch: Batch, dtype: Dtype) -> None:
        """
        Args:
            memory: [slices, blocks, slice bytes] uint8, the KV cache.
            index: of the target in `tables`.
            dtype: of the adapters' elements.
        """
        self._memory = memory
        self._tables = tables
        self._places = tables.meta[index]
        self._batch = batch
        self._dtype = dtype
        sizes = [part.own_outputs for part in target.parts]
        self._outputs = torch.tensor(sizes + [0] * (tables.meta.shape[2] - len(sizes)), dtype=torch.int32)

    def begin(self, x: Tensor) -> Addition:
        raise AssertionError("the layers of a native program are not computed one by one")

    def emit(self, b: ProgramBuilder, source: int, given: Dtype, columns: int, norm: Norm | None = None) -> LowRank:
        addition = self.table()
        b.kept.append(self)
        b.shrink(source, given, columns, addition, norm=None if norm is None else norm.kernel_args())
        return addition

    def table(self) -> LowRank:
        """Return the additions as the kernels read them, through addresses that this object keeps valid."""
        tables, batch, geometry = self._tables, self._batch, self._tables.geometry
        return LowRank(
            memory=self._memory.data_ptr(),
            blocks=tables.blocks.data_ptr(),
            places=self._places.data_ptr(),
            outputs=self._outputs.data_ptr(),
            of_tokens=batch.tokens.adapter.data_ptr(),
            of_logits=batch.logits.adapter.data_ptr(),
            slice_stride=self._memory.stride(0),
            slice_bytes=geometry.slice_bytes,
            slices=geometry.slices,
            tile_bytes=geometry.tile_bytes,
            block_stride=tables.blocks.shape[1],
            parts=len(self._outputs),
            dtype=self._dtype,
        )


class NativeExperts(ExpertsDelta):
    """The additions of all adapters to the experts of one layer; see `TorchExperts`.

    Args:
        products: (expert, whether it is the product after the gate) -> its additions and its target.
        max_rank: largest rank of a part.
    """

    def __init__(self, products: Mapping[tuple[int, bool], tuple[NativeDelta, Target]], max_rank: int) -> None:
        self._products = products
        self._max_rank = max_rank

    def add_to(self, y: Tensor, x: Tensor, expert: int, rows: Tensor, *, down: bool) -> None:
        raise AssertionError("the layers of a native program are not computed one by one")

    def in_program(self, owned: range) -> ExpertAdditions:
        first, second = ([self._products[expert, down] for expert in owned] for down in (False, True))
        ranks = self._max_rank * len(first[0][1].parts)
        inner = second[0][1].parts[0].own_inputs
        return ExpertAdditions(
            [delta.table() for delta, _ in first], [delta.table() for delta, _ in second], ranks, inner
        )


def native_dtype(dtype: torch.dtype, geometry: Geometry, targets: tuple[Target, ...]) -> Dtype:
    """Return the kernels' name of the adapters' dtype.

    Raises:
        ConfigError: the kernels can't read adapters of this dtype, or with these sizes.
    """
    reason = None
    if dtype not in DTYPES:
        reason = f"they lack adapters of {str(dtype).removeprefix('torch.')}"
    elif geometry.tile_bytes < _MIN_TILE:
        reason = f"blocks of the KV cache have {geometry.slice_bytes} bytes in a layer, no multiple of {_MIN_TILE}"
    else:
        several = [target for target in targets if len(target.parts) > 1 and target.expert < 0]  # experts' have a gate
        fused = [part for target in several for part in target.parts]
        odd = next((part for part in fused if part.own_outputs % PANEL), None)
        if odd is not None:
            reason = f"{odd.name} has {odd.own_outputs} outputs, no multiple of {PANEL}"
    if reason is not None:
        raise ConfigError(
            f"The CPU's kernels can't add adapters to this model: {reason}. Set --attention-backend torch."
        )
    return DTYPES[dtype]
