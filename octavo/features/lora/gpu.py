"""`LowRankDelta`: the additions of adapters on a GPU, in two launches beside each product.

With few adapters, the product with B is part of the launch of a gated product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.features.lora.layout import Target
from octavo.features.lora.tables import TILE_ROWS, Assigned, Crowd, Tables, most_tiles
from octavo.features.lora.triton_expand import expand_kernel, gate_kernel
from octavo.features.lora.triton_gated import adapted_gated_kernel
from octavo.features.lora.triton_row import adapted_row_kernel, row_expand_kernel, row_shrink_kernel
from octavo.features.lora.triton_shrink import shrink_kernel
from octavo.nn.delta import Addition, Delta
from octavo.nn.ops import gating
from octavo.nn.ops.few_rows import row_plan
from octavo.nn.ops.gating import multiprocessors
from octavo.nn.ops.triton_overlap import overlap

MAX_PARTS = 3
_RANKS = 16
"""Ranks that a program multiplies at once, the least that the matrix units take."""
_AT_ONCE = 2
"""Adapters that are added at once to a tile of a gated product; with more, the tile's registers are spilled."""
_CHUNK = 32
"""Columns of a gated product that are read from one place."""
_ROW_SPLIT = 4096
"""Inputs of a program that multiplies a single row with a row of A."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How launches divide their work.

    Attributes:
        wide: tiles of inputs that are multiplied with A at once.
        shrinks: programs that multiply with A, on each multiprocessor.
        columns: most columns that a program multiplies with B at once.
        expands, gates: likewise with B; with a gate.
        shrink_warps, expand_warps, gate_warps: warps of a program.
    """

    wide: int
    shrinks: int
    shrink_warps: int
    columns: int
    expands: int
    expand_warps: int
    gates: int
    gate_warps: int


def shape_of(inputs: int) -> Shape:
    """Return the fastest measured shape of launches for a number of inputs."""
    wide, shrinks = (2, 3) if inputs <= 8192 else (4, 4)
    return Shape(wide, shrinks, 4, columns=256, expands=4, expand_warps=4, gates=6, gate_warps=4)


class LowRankDelta(Delta):
    """The additions of all adapters to one target.

    Attributes:
        rows: which adapter each row of the inputs has.
        shape: of launches for several rows.
        joins_gated: the addition to a gated product can be part of its launch.
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
        self.shape = shape_of(self._inputs)
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
        counts = len(rows.tiles) * triton.cdiv(self._ranks, _RANKS)
        self._arrivals = torch.zeros(counts, dtype=torch.int32, device=pool.device)
        self._overlap = overlap(pool.device)
        self.joins_gated = len(self._sizes) == 2 and self._tile % _CHUNK == 0 and self._sizes[0] % _CHUNK == 0

    def begin(self, x: Tensor) -> Addition:
        return Shrunk(self, x)

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
        """Return x [T, in] times A: [T, ranks], undefined where a row has no such rank."""
        count = x.shape[0]
        splits = triton.cdiv(self._inputs, shape.wide * self._tile)
        sums = torch.empty(splits, count, self._ranks, dtype=torch.float32, device=x.device)
        out = torch.empty(count, self._ranks, dtype=self._pool.dtype, device=x.device)
        parts = len(self._sizes)
        if count:
            shrink_kernel[self._programs(shape.shrinks, count, splits * parts)](
                x,
                *self._addresses(),
                sums,
                self._arrivals,
                out,
                *self._counts(count),
                K=self._inputs,
                PARTS=parts,
                WIDE=shape.wide,
                num_warps=shape.shrink_warps,
                **self._fixed,
                **self._overlap,
            )
        return out

    def expand(self, shrunk: Tensor, y: Tensor, shape: Shape) -> None:
        """Add the result of `shrink`, times B, to y [T, out]."""
        count = shrunk.shape[0]
        if not count:
            return
        block = min(shape.columns, self._tile)
        columns = sum(triton.cdiv(size, block) for size in self._sizes)
        sizes = [*self._sizes, 0, 0]
        expand_kernel[self._programs(shape.expands, count, columns)](
            shrunk,
            *self._addresses(),
            y,
            self._pool.shape[1],
            SIZE_0=sizes[0],
            SIZE_1=sizes[1],
            SIZE_2=sizes[2],
            PARTS=len(self._sizes),
            BLOCK_N=block,
            num_warps=shape.expand_warps,
            **self._fixed,
            **self._overlap,
        )

    def gate(self, shrunk: Tensor, y: Tensor, shape: Shape) -> Tensor:
        """Return silu(first half) * second half of y [T, out] plus the additions: [T, out / 2]."""
        count = shrunk.shape[0]
        size = self._sizes[0]
        out = torch.empty(count, size, dtype=y.dtype, device=y.device)
        block = min(shape.columns, self._tile)
        if count:
            gate_kernel[self._programs(shape.gates, count, triton.cdiv(size, block), beside=True)](
                shrunk,
                *self._addresses(),
                self.rows.adapter,
                y,
                out,
                *self._counts(count),
                SIZE=size,
                BLOCK_N=block,
                num_warps=shape.gate_warps,
                **self._fixed,
                **self._overlap,
            )
        return out

    def gated_product(self, x: Tensor, weight: Tensor, shrunk: Tensor) -> Tensor:
        """Return silu(first half) * second half of x @ weight^T plus the additions: [T, out / 2]."""
        fixed = {name: value for name, value in self._fixed.items() if name != "BLOCK_M"}
        pool, blocks, meta, _, used = self._addresses()
        more = shrunk, pool, blocks, meta, used, self.rows.adapter, pool.shape[1]
        return gating.launch(adapted_gated_kernel, x, weight, *more, AT_ONCE=_AT_ONCE, CHUNK=_CHUNK, **fixed)

    def _programs(self, each: int, count: int, pieces: int, *, beside: bool = False) -> tuple[int]:
        """Return the grid of a launch with `each` programs on a multiprocessor, at most one for a piece of a tile.

        Args:
            count: rows.
            beside: it also computes rows without an adapter.
        """
        tiles = most_tiles(count, self._tables.max_adapters) + (triton.cdiv(count, TILE_ROWS) if beside else 0)
        return (min(each * multiprocessors(self._pool.device), tiles * pieces),)

    def _addresses(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return self._pool, self._tables.blocks, self._meta, rows.tiles, rows.used

    def _counts(self, count: int) -> tuple[int, int]:
        return self._pool.shape[1], count


class Shrunk(Addition):
    """An input times A."""

    def __init__(self, delta: LowRankDelta, x: Tensor) -> None:
        self.joins_gated = delta.joins_gated and delta.rows.crowd == Crowd.FEW
        self._delta = delta
        self._value = delta.shrink(x, delta.shape)

    def add_to(self, y: Tensor) -> None:
        self._delta.expand(self._value, y, self._delta.shape)

    def gated(self, y: Tensor) -> Tensor:
        return self._delta.gate(self._value, y, self._delta.shape)

    def gated_product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._delta.gated_product(x, weight, self._value)
