"""`LowRankDelta`: the additions of adapters on a GPU, in two launches beside each product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.features.lora.layout import Target
from octavo.features.lora.tables import TILE_ROWS, Assigned, Tables, most_tiles
from octavo.features.lora.triton_expand import expand_kernel, gate_kernel
from octavo.features.lora.triton_row import adapted_row_kernel, row_expand_kernel, row_shrink_kernel
from octavo.features.lora.triton_shrink import shrink_kernel
from octavo.nn.delta import Addition, Delta
from octavo.nn.ops.few_rows import row_plan
from octavo.nn.ops.triton_overlap import overlap

MAX_PARTS = 3
_RANKS = 16
"""Ranks that a program multiplies at once, the least that the matrix units take."""
_ROW_SPLIT = 4096
"""Inputs of a program that multiplies a single row with a row of A."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How launches divide their work.

    Attributes:
        split: inputs of a program that multiplies with A, in tiles; all of a row's splits are added up in their order.
        shrinks: programs side by side that multiply tiles of rows with A; each takes every so-manieth tile.
        expands: likewise for B.
        shrink_warps, expand_warps: warps of a program.
    """

    split: int
    shrinks: int
    expands: int
    shrink_warps: int
    shrink_stages: int
    expand_warps: int


def shape_of(rows: int, inputs: int) -> Shape:
    """Return the fastest measured shape of launches for so many rows and inputs."""
    return Shape(2 if inputs <= 8192 else 4, 64, 32, 2, 3, 4)


class LowRankDelta(Delta):
    """The additions of all adapters to one target.

    Attributes:
        rows: which adapter each row of the inputs has.
    """

    fused_rows = 1

    def __init__(
        self,
        pool: Tensor,
        tables: Tables,
        target: Target,
        index: int,
        max_rank: int,
        rows: Assigned,
    ) -> None:
        """
        Args:
            pool: [slices, blocks, elements of a slice], the KV cache in the adapters' dtype.
            index: of the target in `tables`.
            max_rank: the largest rank of a part.
        """
        if len(target.parts) > MAX_PARTS:
            raise AssertionError(f"{target.path} has {len(target.parts)} parts; the kernels take {MAX_PARTS}")
        self.rows = rows
        self._pool = pool
        self._tables = tables
        self._meta = tables.meta[index]
        self._inputs = target.parts[0].own_inputs
        self._sizes = [part.own_outputs for part in target.parts]
        self._ranks = max_rank * len(target.parts)
        geometry = tables.geometry
        self._tile = geometry.tile_bytes // geometry.element_size
        self._fixed: dict[str, Any] = {
            "RANKS": self._ranks,
            "MAX_BLOCKS": tables.blocks.shape[1],
            "META_PARTS": tables.meta.shape[2],
            "SLICES": geometry.slices,
            "SLICE_TILES": geometry.slice_tiles,
            "TILE": self._tile,
            "BLOCK_M": TILE_ROWS,
            "BLOCK_R": _RANKS,
        }
        splits = triton.cdiv(self._inputs, _ROW_SPLIT)
        self._sums = torch.empty(splits, self._ranks + 1, dtype=torch.float32, device=pool.device)
        self._row = torch.empty(sum(self._sizes), dtype=torch.float32, device=pool.device)
        self._overlap = overlap(pool.device)

    def begin(self, x: Tensor) -> Addition:
        shape = self.shape(x.shape[0])
        return Shrunk(self, self.shrink(x, shape), shape)

    def fused(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.empty(1, outputs, dtype=dtype or weight.dtype, device=x.device) if add_to is None else add_to
        scale, eps = norm if norm is not None else (x, 0.0)
        plan = row_plan(self._inputs, gated=gated, normed=norm is not None, device=x.device)
        self._add_row(x, scale, eps, normed=norm is not None)
        adapted_row_kernel[(triton.cdiv(outputs, plan.block_n),)](
            x,
            scale,
            weight,
            x if bias is None else bias,
            out,
            self._row,
            out,
            eps,
            N=outputs,
            K=self._inputs,
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            NORMED=norm is not None,
            GATED=gated,
            BIASED=bias is not None,
            ADDED=add_to is not None,
            num_warps=plan.warps,
            **self._overlap,
        )
        return out

    def _add_row(self, x: Tensor, scale: Tensor, eps: float, *, normed: bool) -> None:
        """Compute the addition to one row, in `_row`."""
        tables = self._pool, self._tables.blocks, self._meta, self.rows.adapter, self._sums
        fixed = {name: value for name, value in self._fixed.items() if name not in ("BLOCK_M", "BLOCK_R")}
        fixed |= {"K": self._inputs, "PARTS": len(self._sizes), "NORMED": normed} | self._overlap
        splits = self._sums.shape[0]
        row_shrink_kernel[(self._ranks, splits)](
            x, scale, *tables, self._pool.shape[1], WIDE=_ROW_SPLIT // self._tile, **fixed
        )
        sizes = [*self._sizes, 0, 0]
        row_expand_kernel[(sum(triton.cdiv(size, self._tile) for size in self._sizes),)](
            *tables,
            self._row,
            eps,
            self._pool.shape[1],
            SIZE_0=sizes[0],
            SIZE_1=sizes[1],
            SIZE_2=sizes[2],
            BLOCK_R=_RANKS,
            SPLITS=splits,
            **fixed,
        )

    def shrink(self, x: Tensor, shape: Shape) -> Tensor:
        """Return x [T, in] times A, by a row's place in `Assigned.order`: [splits, T, ranks] float32."""
        count = x.shape[0]
        split = shape.split * self._tile
        splits = triton.cdiv(self._inputs, split)
        out = torch.empty(splits, count, self._ranks, dtype=torch.float32, device=x.device)
        if not count:
            return out
        parts = len(self._sizes)
        slots = min(shape.shrinks, most_tiles(count, self._tables.max_adapters))
        shrink_kernel[(splits, parts, slots)](
            x,
            *self._addresses(),
            out,
            *self._counts(count),
            K=self._inputs,
            PARTS=parts,
            SPLIT=split,
            num_warps=shape.shrink_warps,
            num_stages=shape.shrink_stages,
            **self._fixed,
            **self._overlap,
        )
        return out

    def expand(self, shrunk: Tensor, y: Tensor, shape: Shape) -> None:
        """Add the result of `shrink`, times B, to y [T, out]."""
        splits, count, _ = shrunk.shape
        if not count:
            return
        slots = min(shape.expands, most_tiles(count, self._tables.max_adapters))
        columns = sum(triton.cdiv(size, self._tile) for size in self._sizes)
        sizes = [*self._sizes, 0, 0]
        expand_kernel[(columns, slots)](
            shrunk,
            *self._addresses(),
            y,
            *self._counts(count),
            SIZE_0=sizes[0],
            SIZE_1=sizes[1],
            SIZE_2=sizes[2],
            PARTS=len(self._sizes),
            SPLITS=splits,
            num_warps=shape.expand_warps,
            **self._fixed,
            **self._overlap,
        )

    def gate(self, shrunk: Tensor, y: Tensor, shape: Shape) -> Tensor:
        """Return silu(first half) * second half of y [T, out] plus the additions: [T, out / 2]."""
        splits, count, _ = shrunk.shape
        size = self._sizes[0]
        out = torch.empty(count, size, dtype=y.dtype, device=y.device)
        if not count:
            return out
        slots = min(shape.expands, most_tiles(count, self._tables.max_adapters))
        gate_kernel[(triton.cdiv(size, self._tile), slots + triton.cdiv(count, TILE_ROWS))](
            shrunk,
            *self._addresses(),
            self.rows.adapter,
            y,
            out,
            *self._counts(count),
            count,
            slots,
            SIZE=size,
            SPLITS=splits,
            num_warps=shape.expand_warps,
            **self._fixed,
            **self._overlap,
        )
        return out

    def shape(self, rows: int) -> Shape:
        """Return the shape of launches for so many rows."""
        return shape_of(rows, self._inputs)

    def _addresses(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return self._pool, self._tables.blocks, self._meta, rows.order, rows.tiles

    def _counts(self, count: int) -> tuple[int, int, int]:
        return self._pool.shape[1], len(self.rows.tiles), count


class Shrunk(Addition):
    """An input times A."""

    def __init__(self, delta: LowRankDelta, value: Tensor, shape: Shape) -> None:
        self._delta = delta
        self._value = value
        self._shape = shape

    def add_to(self, y: Tensor) -> None:
        self._delta.expand(self._value, y, self._shape)

    def gated(self, y: Tensor) -> Tensor:
        return self._delta.gate(self._value, y, self._shape)
