"""`LowRankDelta`: the additions of adapters on a GPU, two launches beside each product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.features.lora.layout import Target
from octavo.features.lora.tables import TILE_ROWS, Assigned, Tables, most_tiles
from octavo.features.lora.triton_expand import expand_kernel, gate_kernel
from octavo.features.lora.triton_row import adapted_row_kernel, row_shrink_kernel
from octavo.features.lora.triton_shrink import shrink_kernel
from octavo.nn.delta import Addition, Delta
from octavo.nn.ops.few_rows import RowPlan, row_plan
from octavo.nn.ops.triton_overlap import overlap

MAX_PARTS = 3
_RANKS = 16
"""Ranks that a program multiplies at once, the least that the matrix units take."""


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


@dataclass(frozen=True, slots=True)
class RowForm:
    """How a single row is multiplied.

    Attributes:
        plan: of the product with the matrix.
        shrinks: programs that multiply with A.
        early: read B before the matrix.
    """

    plan: RowPlan
    shrinks: int
    early: bool


def row_form(inputs: int, *, gated: bool, normed: bool, device: torch.device) -> RowForm:
    """Return the fastest measured form."""
    plan = row_plan(inputs, gated=gated, normed=normed, device=device)
    # Triton's interpreter runs programs in sequence.
    return RowForm(plan, 192 if device.type == "cuda" else 3, early=False)


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
        beside: torch.cuda.Stream | None = None,
    ) -> None:
        """
        Args:
            pool: [slices, blocks, elements of a slice], the KV cache in the adapters' dtype.
            index: of the target in `tables`.
            max_rank: the largest rank of a part.
            beside: multiply with A on this stream, beside the product.
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
        self._sums = torch.empty(self._ranks, dtype=torch.float32, device=pool.device)
        self._overlap = overlap(pool.device) if beside is None else {"OVERLAPS": False}
        self._beside = beside

    def begin(self, x: Tensor) -> Addition:
        shape = self.shape(x.shape[0])
        if self._beside is None:
            return Shrunk(self, self.shrink(x, shape), shape)
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            value = self.shrink(x, shape)
        return Shrunk(self, value, shape, self._beside)

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
        form = row_form(self._inputs, gated=gated, normed=norm is not None, device=x.device)
        fixed = {name: value for name, value in self._fixed.items() if name not in ("RANKS", "BLOCK_M", "BLOCK_R")}
        fixed |= overlap(x.device)
        tables = self._pool, self._tables.blocks, self._meta, self.rows.adapter, self._sums
        row_shrink_kernel[(min(form.shrinks, self._ranks),)](
            x,
            scale,
            *tables,
            eps,
            self._pool.shape[1],
            K=self._inputs,
            PARTS=len(self._sizes),
            WIDE=max(1, min(2048, triton.next_power_of_2(self._inputs)) // self._tile),
            NORMED=norm is not None,
            **fixed,
        )
        sizes = [*self._sizes, 0, 0]
        plan = form.plan
        adapted_row_kernel[(triton.cdiv(outputs, plan.block_n),)](
            x,
            scale,
            weight,
            x if bias is None else bias,
            out,
            out,
            *tables,
            eps,
            self._pool.shape[1],
            N=outputs,
            K=self._inputs,
            SIZE_0=sizes[0],
            SIZE_1=sizes[1],
            SIZE_2=sizes[2],
            PARTS=len(self._sizes),
            BLOCK_N=plan.block_n,
            BLOCK_K=plan.block_k,
            BLOCK_R=_RANKS,
            NORMED=norm is not None,
            GATED=gated,
            BIASED=bias is not None,
            ADDED=add_to is not None,
            AHEAD=plan.ahead,
            EARLY=form.early,
            num_warps=plan.warps,
            **fixed,
        )
        return out

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
            SIZE=size,
            SPLITS=splits,
            SLOTS=slots,
            num_warps=shape.expand_warps,
            **self._fixed,
            **self._overlap,
        )
        return out

    @property
    def gates(self) -> bool:
        """Whether the parts can be a gate and its operand."""
        return len(self._sizes) == 2 and self._sizes[0] == self._sizes[1]

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

    def __init__(
        self, delta: LowRankDelta, value: Tensor, shape: Shape, stream: torch.cuda.Stream | None = None
    ) -> None:
        self._delta = delta
        self._value = value
        self._shape = shape
        self._stream = stream

    def add_to(self, y: Tensor) -> None:
        self._join()
        self._delta.expand(self._value, y, self._shape)

    def gated(self, y: Tensor) -> Tensor:
        self._join()
        return self._delta.gate(self._value, y, self._shape)

    def _join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
