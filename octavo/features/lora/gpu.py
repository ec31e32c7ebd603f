"""`LowRankDelta`: the additions of adapters on a GPU, in two launches beside each product; those to one row in the
product's own launch where a CUDA kernel computes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.features.lora import kernels
from octavo.features.lora.kernels import Form
from octavo.features.lora.layout import Target
from octavo.features.lora.row import RowAddition
from octavo.features.lora.tables import RANKS, TILE_ROWS, Assigned, Tables, most_tiles
from octavo.features.lora.triton_row import adapted_row_kernel, row_expand_kernel, row_shrink_kernel
from octavo.nn.delta import Addition, Delta
from octavo.nn.ops import row16, stored_row
from octavo.nn.ops.few_rows import row_plan
from octavo.nn.ops.one_row import takes_ring
from octavo.nn.ops.ring import multiprocessors
from octavo.nn.ops.triton_overlap import overlap

_ROW_SPLIT, _ROW_OUTPUTS = 4096, 256
"""Inputs of a program that multiplies a single row with a row of A; outputs of one that multiplies with B."""
_SPLITS = {64: 8, 256: 4, 1024: 2}
"""Largest number of rows -> most splits of the inputs. Without splits, few rows would leave multiprocessors idle."""


class Sums(NamedTuple):
    """A result of the first half.

    Attributes:
        values: [splits, rows, parts * ranks] float32.
    """

    values: Tensor
    rows: int
    splits: int


class LowRankDelta(Delta):
    """The additions of all adapters to one target, or to some of its parts.

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
        own: slice = slice(None),
    ) -> None:
        """
        Args:
            pool: [slices, blocks, elements of a slice], the KV cache in the adapters' dtype.
            target: one that `kernels.serves` accepts.
            index: of the target in `tables`.
            max_rank: the largest rank of a part.
            own: the parts that it adds to, at most `kernels.MAX_PARTS`.
        """
        parts = target.parts[own]
        assert len(parts) <= kernels.MAX_PARTS
        self.rows = rows
        self.form = Form.of(pool.dtype, tables.geometry, len(parts), max_rank)
        self._pool, self._tables, self._meta = pool, tables, tables.meta[index, :, own]
        self._inputs = parts[0].own_inputs
        self._sizes = [part.own_outputs for part in parts]
        self._most_splits = cdiv(tables.geometry.row_tiles(self._inputs), kernels.WARPS)
        self._blocks = kernels.BLOCKS * multiprocessors(pool.device)
        self._fixed: dict[str, Any] = {
            "MAX_BLOCKS": tables.blocks.shape[1],
            "META_PARTS": tables.meta.shape[2],
            "SLICES": tables.geometry.slices,
            "SLICE_TILES": tables.geometry.slice_tiles,
            "TILE": tables.geometry.tile_bytes // tables.geometry.element_size,
        }
        of_row = cdiv(self._inputs, _ROW_SPLIT), max_rank * len(self._sizes) + 1
        self._sums = torch.empty(of_row, dtype=torch.float32, device=pool.device)
        self._row = torch.empty(sum(self._sizes), dtype=torch.float32, device=pool.device)

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
        if self.joins(weight, None if norm is None else norm[0].dtype, gated=gated, added=add_to is not None):
            return row16.row_product(
                x,
                weight,
                bias=bias,
                norm=norm,
                gated=gated,
                add_to=add_to,
                dtype=dtype,
                joined=self.in_product.joined,
            )
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.empty(1, outputs, dtype=dtype or weight.dtype, device=x.device) if add_to is None else add_to
        scale, eps = norm if norm is not None else (x, 0.0)
        plan = row_plan(self._inputs, gated=gated, normed=norm is not None, device=x.device)
        self._add_row(x, scale, eps, normed=norm is not None)
        adapted_row_kernel[(cdiv(outputs, plan.block_n),)](
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
            **overlap(x.device),
        )
        return out

    def joins(self, weight: Tensor, scale: torch.dtype | None, *, gated: bool, added: bool) -> bool:
        """Return whether the addition to one row is part of the launch of its product with a plain matrix.

        Args:
            scale: dtype of the norm's weights; None without a norm.
        """
        outputs, inputs = weight.shape
        fused: dict[str, Any] = {"scale": scale, "gated": gated, "added": added}
        if weight.dtype != self._pool.dtype or not takes_ring(outputs, inputs, weight.dtype, weight.device, **fused):
            return False
        return stored_row.joins(outputs, weight.device, gated=gated)

    @functools.cached_property
    def in_product(self) -> RowAddition:
        return RowAddition(self._pool, self._tables, self._meta, self.rows.adapter, self._sizes, self.form)

    def _add_row(self, x: Tensor, scale: Tensor, eps: float, *, normed: bool) -> None:
        """Compute the addition to one row, in `_row`."""
        tables = *self._addresses(), self.rows.adapter, self._sums
        fixed = self._fixed | {"K": self._inputs, "PARTS": len(self._sizes), "NORMED": normed} | overlap(x.device)
        splits, ranks = self._sums.shape
        row_shrink_kernel[(ranks - 1, splits)](
            x, scale, *tables, self._pool.shape[1], WIDE=_ROW_SPLIT // fixed["TILE"], RANKS=ranks - 1, **fixed
        )
        size_0, size_1, size_2 = self._three_sizes
        row_expand_kernel[(sum(cdiv(size, _ROW_OUTPUTS) for size in self._sizes),)](
            *tables,
            self._row,
            eps,
            self._pool.shape[1],
            SIZE_0=size_0,
            SIZE_1=size_1,
            SIZE_2=size_2,
            BLOCK_R=RANKS,
            BLOCK_N=_ROW_OUTPUTS,
            SPLITS=splits,
            RANKS=ranks - 1,
            **fixed,
        )

    def room(self, count: int) -> Sums:
        """Return what `shrink` fills for a number of rows."""
        splits = min(self._most_splits, next((most for rows, most in _SPLITS.items() if count <= rows), 1))
        size = splits, count, self.form.parts * self.form.ranks
        return Sums(torch.empty(size, dtype=torch.float32, device=self._pool.device), count, splits)

    def shrink(self, x: Tensor) -> Sums:
        """Return x [T, in], contiguous, times A, undefined where a row has no such rank."""
        sums = self.room(x.shape[0])
        if sums.rows:
            kernel = kernels.shrink(self.form, x_float=x.dtype != self._pool.dtype)
            groups = cdiv(self.form.ranks, RANKS) * self.form.parts
            items = most_tiles(sums.rows, self._tables.max_adapters) * groups * sums.splits
            tensors = [x, *self._addresses(), self.rows.tiles, self.rows.work, sums.values]
            numbers = [*self._pages(), self._inputs, sums.rows, sums.splits]
            kernels.launch(kernel, min(self._blocks, items), tensors, numbers)
        return sums

    def expand(self, sums: Sums, y: Tensor) -> None:
        """Add the result of `shrink`, times B, to y [T, out], whose rows may be parts of longer ones."""
        self._expand(sums, y, y, gates=False)

    def expand_alone(self, sums: Sums) -> Tensor:
        """Return the result of `shrink`, times B, [T, out], undefined in rows without an adapter."""
        out = torch.empty(sums.rows, self.width, dtype=self._pool.dtype, device=self._pool.device)
        self._expand(sums, out, out, gates=False, alone=True)
        return out

    def gate(self, sums: Sums, y: Tensor) -> Tensor:
        """Return silu(first half) * second half of y [T, out] plus the additions: [T, out / 2]."""
        out = torch.empty(sums.rows, self._sizes[0], dtype=y.dtype, device=y.device)
        self._expand(sums, y, out, gates=True)
        return out

    def _expand(self, sums: Sums, y: Tensor, out: Tensor, *, gates: bool, alone: bool = False) -> None:
        if not sums.rows:
            return
        rows = self.rows
        tensors = [sums.values, *self._addresses(), rows.tiles, rows.ends, rows.rest, rows.adapter, y, out]
        room = most_tiles(sums.rows, self._tables.max_adapters)
        pieces = sum(cdiv(size, kernels.OUTPUTS) for size in (2 * self._sizes[:1] if gates else self._sizes))
        tiles = room + (cdiv(sums.rows, TILE_ROWS) if gates else 0)
        numbers = [*self._pages(), sums.rows, sums.splits, room, y.stride(0), *self._three_sizes]
        kernel = kernels.expand(self.form, gates=gates, alone=alone)
        kernels.launch(kernel, min(self._blocks, cdiv(tiles * pieces, kernels.WARPS)), tensors, numbers)

    def _addresses(self) -> tuple[Tensor, ...]:
        return self._pool, self._tables.blocks, self._meta

    def _pages(self) -> list[int]:
        """Return the numbers of the pool and the tables that all kernels take first."""
        return [self._pool.shape[1], self._tables.blocks.shape[1], self._tables.meta.shape[2]]

    @property
    def width(self) -> int:
        """Outputs of all its parts."""
        return sum(self._sizes)

    @property
    def _three_sizes(self) -> list[int]:
        """Outputs of each part; 0 for those that are missing."""
        return [*self._sizes, 0, 0][: kernels.MAX_PARTS]


class Shrunk(Addition):
    """An input times A."""

    def __init__(self, delta: LowRankDelta, x: Tensor) -> None:
        self._delta = delta
        self._sums = delta.shrink(x)

    def add_to(self, y: Tensor) -> None:
        self._delta.expand(self._sums, y)

    def gated(self, y: Tensor) -> Tensor:
        return self._delta.gate(self._sums, y)

    def alone(self) -> tuple[Tensor, Tensor]:
        return self._delta.expand_alone(self._sums), self._delta.rows.adapter


class SplitDelta(Delta):
    """The additions to a target with more parts than a launch adds to, such as the six projections of Qwen3-Next's
    linear attention.

    Attributes:
        deltas: of consecutive parts.
    """

    def __init__(self, deltas: Sequence[LowRankDelta]) -> None:
        self.deltas = deltas

    def begin(self, x: Tensor) -> Addition:
        return _Split([delta.begin(x) for delta in self.deltas], [delta.width for delta in self.deltas])


class _Split(Addition):
    def __init__(self, parts: Sequence[Addition], widths: list[int]) -> None:
        self._parts, self._widths = parts, widths

    def add_to(self, y: Tensor) -> None:
        for part, outputs in zip(self._parts, y.split(self._widths, dim=1), strict=True):
            part.add_to(outputs)


def low_rank_delta(
    pool: Tensor, tables: Tables, target: Target, index: int, max_rank: int, rows: Assigned
) -> LowRankDelta | SplitDelta:
    """Return the additions of all adapters to a target; see `LowRankDelta`."""
    made = [
        LowRankDelta(pool, tables, target, index, max_rank, rows, slice(first, first + kernels.MAX_PARTS))
        for first in range(0, len(target.parts), kernels.MAX_PARTS)
    ]
    return made[0] if len(made) == 1 else SplitDelta(made)
