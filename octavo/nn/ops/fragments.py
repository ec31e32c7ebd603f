"""Products with a matrix of 4- or 8-bit numbers on a Hopper GPU, by the CUDA kernels of `cuda/`.

Their codes are stored in the order in which threads pass values to the matrix units: each thread loads its own with
16 bytes a load and widens them in registers. In Triton, whose kernels (`triton_words.py`) run on all GPUs, products
wait for the widening; here it runs while the previous values are multiplied.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv
from octavo.nn.ops import nvrtc
from octavo.nn.ops.norm import rms_norm
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.ring import (
    HALF_SHARED,
    LEAST_DEPTH,
    MOST_INPUTS,
    SHARED,
    RingPlan,
    RowForm,
    blocks_of,
    multiprocessors,
)
from octavo.nn.ops.triton_sum import sum_parts

OUTPUTS = 64
"""Outputs of a warp group's tile, and inputs of a step; both divide the matrix."""
_BLOCK_OUTPUTS = 2 * OUTPUTS
_THREADS = 256
_ALIGNMENT = 1024
"""Of tiles in shared memory."""
_FEW_ROWS = 64
_SMALL_GROUP = 16
_STEP_BYTES_OF_BIT = 128
"""Bytes of a step of 16 outputs, for each bit of a code."""
_SCALE_BYTES = 32
"""Bytes of a group's scales of 16 outputs."""
_START_BYTES = 16
"""Bytes that a unit of a row's inputs begins with; see `cuda/row.cu`."""
_APART_BYTES = 64
"""Bytes between several rows, so that threads read different banks."""
_MOST_PARTS = 8
_TILES = {
    4: {16: (8, 16, 2), 32: (4, 8, 2), 64: (4, 8, 2), 128: (2, 6, 2), 192: (4, 6, 1), 256: (4, 6, 1)},
    8: {16: (4, 16, 2), 32: (2, 8, 2), 64: (2, 8, 2), 128: (2, 6, 2), 192: (4, 6, 1), 256: (4, 6, 1)},
}
"""Bits -> rows of a tile -> depth, stages, blocks; see `RowsPlan`."""
_LARGE = 3
"""Tiles for more rows than one has."""
_HALF_TILE = 128
"""Half the rows of the largest tile."""
_HALF = (_HALF_TILE, 4, 6, 1)
"""How blocks of half tiles divide a product; one runs on a multiprocessor, and needs more depth than one of two."""
Kind = Literal["integers", "e4m3", "table"]
SCALE_UNITS: dict[Kind, float] = {"integers": 1.0, "e4m3": 2.0**-7, "table": 1.0}
"""A scale divided by what is stored of it: E4M3's are often too small for float16. `cuda/codes.cuh` has them, too."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """A matrix [N, K] of small numbers: value = scale * number + minimum.

    Attributes:
        codes: [N / 64, K / 64, bits / 4, 128, 4] int32: 16 bytes for each thread; see `quant/fragments.py`. Integers of
            8 bits are stored less 128.
        scales: [N / 64, G / S, 4, 8, S, V, 2] float16: for S groups of `group` inputs, those of a step or one, the
            scales and with V = 2 the minima of outputs 16 a + b and 16 a + b + 8. A thread loads a step's at once.
            Scales are divided by the kind's `SCALE_UNITS`.
        order: [K] int32: input of the layer that the matrix's column multiplies; None if they are in order.
        outputs, inputs: N and K.
        bits: 4 or 8.
        group: 16, 32, a multiple of 64, or all inputs.
        kind: what a code stands for: an integer, plus 2 ** (bits - 1); an 8-bit float; or a place in a table of 16
            numbers.
        book: of a table, else None; see `tables.py`.
    """

    codes: Tensor
    scales: Tensor
    order: Tensor | None
    outputs: int
    inputs: int
    bits: int
    group: int
    kind: Kind = "integers"
    book: Tensor | None = None

    @property
    def groups(self) -> int:
        return self.scales.shape[1] * self.scales.shape[4]

    @property
    def has_minima(self) -> bool:
        return self.scales.shape[5] == 2


class Form(NamedTuple):
    """What the kernels know of a matrix when they are compiled.

    Attributes:
        group: inputs that share a scale, which is multiplied with numbers; 0 if it is multiplied with an output's sum.
    """

    bits: int
    group: int
    minima: bool
    kind: Kind = "integers"


class RowsPlan(NamedTuple):
    """How blocks divide a product of several rows.

    Attributes:
        rows: of a block's tile.
        depth: steps whose codes a thread holds.
        stages: steps whose rows are in shared memory.
        blocks: of a multiprocessor.
        parts: blocks that share an output's inputs.
    """

    rows: int
    depth: int
    stages: int
    blocks: int
    parts: int


def fits(outputs: int, inputs: int, group: int) -> bool:
    """Return whether a matrix can be stored as fragments."""
    divided = outputs % OUTPUTS == 0 and inputs % OUTPUTS == 0
    return divided and (group == inputs or group % OUTPUTS == 0 or group in (_SMALL_GROUP, 32))


def product(x: Tensor, matrix: Fragments, bias: Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Return y = x [M, K] @ W^T + bias: [M, N], or silu(first half) * second half of y: [M, N / 2].

    It is rounded once to `dtype`, except for parts of many rows. x is in the matrix's order of inputs.
    """
    plan = rows_plan(matrix, x.shape[0])
    whole = plan.parts == 1 and bias is None and dtype in (x.dtype, torch.float32)
    if whole and (gates(matrix) or not gated):
        return rows_product(x, matrix, plan, dtype, gated=gated)[0]
    return sum_parts(rows_product(x, matrix, plan, dtype_of_parts(x)), bias, dtype, gated=gated)


def dtype_of_parts(x: Tensor) -> torch.dtype:
    """Return in which dtype to store parts of a product with x: many rows take long to write."""
    return torch.float32 if x.shape[0] <= _FEW_ROWS else x.dtype


def rows_product(x: Tensor, matrix: Fragments, plan: RowsPlan, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """Return y = x [M, K] @ W^T in parts over the inputs, whose sum it is: [plan.parts, M, N].

    Args:
        x: contiguous, of a 16-bit dtype, in the matrix's order of inputs.
        dtype: of the parts: x's or float32.
        gated: return silu(first half) * second half of y instead: [1, M, N / 2]. For a plan of one part, and a matrix
            that `gates` accepts.
    """
    rows, outputs = x.shape[0], matrix.outputs
    out = torch.empty(plan.parts, rows, outputs // 2 if gated else outputs, dtype=dtype, device=x.device)
    columns = cdiv(outputs, _BLOCK_OUTPUTS)
    last = last_columns(plan, columns, rows, multiprocessors(x.device))

    def launch(plan: RowsPlan, begin: int, end: int) -> None:
        _rows_kernel(plan._replace(parts=1), form_of(matrix), x.dtype, gated=gated).launch(
            (end - begin, plan.parts, cdiv(rows, plan.rows)),
            [
                nvrtc.tiles_of(x, plan.rows, OUTPUTS),
                address(matrix.codes),
                address(matrix.scales),
                address(out),
                *map(c_int, (rows, outputs, matrix.inputs, matrix.groups, dtype == torch.float32, begin)),
                book_of(matrix),
            ],
        )

    launch(plan, 0, columns - last)
    if last:
        launch(RowsPlan(*_HALF, 1), columns - last, columns)
    return out


def row_product(
    x: Tensor,
    matrix: Fragments,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    dtype: torch.dtype | None = None,
    narrow: torch.dtype,
    plan: RingPlan | None = None,
) -> Tensor:
    """Return the product of one row; see `few_rows.fused_product`.

    Args:
        narrow: the 16-bit dtype of the norm's weights, of the bias, and of x and the result if they are not float32.
        plan: None for the one of `ring_plan`.
    """
    if norm is not None and norm[0].dtype != narrow:
        x, norm = rms_norm(x, *norm, narrow), None
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    out = add_to
    if out is None:
        out = torch.empty(1, outputs, dtype=dtype or narrow, device=x.device)
    scale, eps = norm if norm is not None else (x, 0.0)
    fused = RowForm(
        gated,
        norm is not None,
        bias is not None,
        add_to is not None,
        x.dtype == torch.float32,
        out.dtype == torch.float32,
    )
    plan = plan or ring_plan(form_of(matrix), gated=gated)
    kernel = _row_kernel(form_of(matrix), narrow, matrix.outputs, matrix.inputs, fused, plan)
    kernel.launch(
        (blocks_of(outputs, x.device), 1, 1),
        [
            address(x),
            address(scale),
            address(matrix.codes),
            address(matrix.scales),
            address(x if bias is None else bias),
            address(out),
            c_float(eps),
            c_int(1),
            book_of(matrix),
        ],
    )
    return out


def rows_plan(matrix: Fragments, rows: int) -> RowsPlan:
    """Return how blocks divide a product, as measured on an H200: at most one round of them, unless whole tiles fill
    several."""
    plan = plan_of(matrix.bits, tile_rows(rows))
    tiles = cdiv(matrix.outputs, _BLOCK_OUTPUTS) * cdiv(rows, plan.rows)
    room = multiprocessors(matrix.codes.device) * plan.blocks
    wanted = min(_MOST_PARTS, room // tiles, matrix.inputs // (4 * OUTPUTS))
    return plan._replace(parts=1 << max(0, wanted.bit_length() - 1))


def plan_of(bits: int, rows: int) -> RowsPlan:
    """Return the plan for tiles of `rows` rows, in one part."""
    return RowsPlan(rows, *_TILES[bits][rows], 1)


def last_columns(plan: RowsPlan, columns: int, rows: int, multiprocessors: int) -> int:
    """Return how many of a product's last columns of tiles to launch in tiles of half the rows.

    Blocks of large tiles run in rounds, one for each multiprocessor. If less than half of the last round's would have
    one, halves of these tiles take half a round.
    """
    down, halves = cdiv(rows, plan.rows), cdiv(rows, _HALF_TILE)
    if plan.rows < 2 * _HALF_TILE or plan.parts > 1 or columns * down <= multiprocessors:
        return 0
    left = cdiv(columns * down % multiprocessors, down)
    return left if left * halves <= multiprocessors else 0


def fuses(matrix: Fragments) -> bool:
    """Return whether `row_product` supports a matrix: the row must fit in shared memory, in the order of inputs."""
    return matrix.order is None and matrix.inputs <= MOST_INPUTS


def gates(matrix: Fragments) -> bool:
    """Return whether `rows_product` can gate: the gate and what it gates must be whole tiles."""
    return matrix.outputs % _BLOCK_OUTPUTS == 0


def compile_ahead(matrix: Fragments, dtype: torch.dtype, only: int | None = None) -> None:
    """Compile the kernels for a matrix's products of several rows in the background: all, or that of one tile, which
    does not gate."""
    divisions = [(tile, *division) for tile, division in _TILES[matrix.bits].items() if only in (None, tile)]
    for division in [*divisions, _HALF] if only is None else divisions:
        plan = RowsPlan(*division, 1)
        for gated in (False, True) if only is None and gates(matrix) else (False,):
            nvrtc.compile_ahead(*_rows_source(plan, form_of(matrix), dtype, gated=gated))


def tile_rows(rows: int) -> int:
    """Return the rows of a tile: those of the smallest, or what fills up the fewest rows."""
    tiles = list(_TILES[4])
    return next((tile for tile in tiles if rows <= tile), 0) or min(
        reversed(tiles[-_LARGE:]), key=lambda tile: cdiv(rows, tile) * tile
    )


def form_of(matrix: Fragments) -> Form:
    """Return a matrix's form. A scale per output is multiplied with sums, unless there are minima; or a table, which
    may lack the 0 that steps beyond the last one multiply."""
    minima = matrix.has_minima
    last = matrix.group == matrix.inputs and not minima and matrix.kind != "table"
    return Form(matrix.bits, 0 if last else matrix.group, minima, matrix.kind)


def book_of(matrix: Fragments) -> c_void_p:
    """Return the address of a table's book; kernels of other numbers read nothing there."""
    return address(matrix.scales if matrix.book is None else matrix.book)


def macros_of(form: Form, dtype: torch.dtype) -> dict[str, int]:
    kinds = {"E4M3": int(form.kind == "e4m3"), "TABLE": int(form.kind == "table")}
    half = int(dtype == torch.float16)
    return {"BITS": form.bits, "GROUP": form.group, "MINIMA": int(form.minima), "HALF": half, **kinds}


@functools.cache
def _rows_kernel(plan: RowsPlan, form: Form, dtype: torch.dtype, *, gated: bool) -> Kernel:
    shared = plan.stages * plan.rows * 2 * OUTPUTS + _ALIGNMENT
    return Kernel("rows", *_rows_source(plan, form, dtype, gated=gated), _THREADS, shared)


def _rows_source(plan: RowsPlan, form: Form, dtype: torch.dtype, *, gated: bool) -> tuple[str, dict[str, int]]:
    depth = 2 if form.group == _SMALL_GROUP else plan.depth  # there are enough registers for their scales then
    sizes = {"ROWS": plan.rows, "DEPTH": depth, "STAGES": plan.stages, "BLOCKS": plan.blocks, "GATED": int(gated)}
    before = nvrtc.source_of("integers.cuh", "codes.cuh", "barriers.cuh")
    return before + multiply_source(plan.rows, dtype) + nvrtc.source_of("rows.cu"), {**macros_of(form, dtype), **sizes}


def compile_row_ahead(matrix: Fragments, dtype: torch.dtype, fused: RowForm) -> None:
    """Compile the kernel for a matrix's product of one row in the background."""
    form = form_of(matrix)
    plan = ring_plan(form, gated=fused.gated)
    source, macros, _, _ = row_source(form, dtype, matrix.outputs, matrix.inputs, fused, plan)
    nvrtc.compile_ahead(source, macros)


def ring_plan(form: Form, *, gated: bool) -> RingPlan:
    """Return how a block copies a matrix for the product of one row, as measured on an H200: warps share usual numbers
    of inputs evenly."""
    longer = gated and form.bits == 4 and (form.group == 0 or form.group >= 2 * OUTPUTS)
    return RingPlan(16, 4 if longer else 2, SHARED)


@functools.cache
def _row_kernel(form: Form, dtype: torch.dtype, outputs: int, inputs: int, fused: RowForm, plan: RingPlan) -> Kernel:
    return Kernel("row", *row_source(form, dtype, outputs, inputs, fused, plan))


def row_source(
    form: Form, dtype: torch.dtype, outputs: int, inputs: int, fused: RowForm, plan: RingPlan, parts: int = 1
) -> tuple[str, dict[str, int], int, int]:
    """Return source, macros, threads and bytes of shared memory.

    Args:
        dtype: the narrow one.
        parts: launches that multiply some of the inputs each.
    """
    own = inputs // parts
    held, slot = row_bytes(form, own, fused), plan.warps * span_bytes(form, fused, plan.span)
    depth = max(LEAST_DEPTH, (plan.shared - held) // slot)
    held -= fused.sum_bytes if fused.rows > 1 else 0  # the kernel has them beside
    macros = {**macros_of(form, dtype), "FORM": 4, "N": outputs, "K": own, "LINE": inputs, "WARPS": plan.warps}
    macros |= {"SPAN": plan.span, "DEPTH": depth, "BLOCKS": 2 if plan.shared <= HALF_SHARED else 1, **fused.macros()}
    source = nvrtc.source_of("integers.cuh", "codes.cuh", "copies.cuh", "row.cuh", "row.cu")
    return source, macros, 32 * plan.warps, depth * slot + held


def row_bytes(form: Form, inputs: int, fused: RowForm) -> int:
    """Return the bytes of x in shared memory, with what units of its inputs begin with; several rows are apart, and
    their sums count, too."""
    units = inputs // OUTPUTS * _units(form)
    if fused.rows == 1:
        return 2 * inputs + units * _START_BYTES
    return fused.rows * (2 * inputs + _APART_BYTES + units * 4) + fused.sum_bytes


def span_bytes(form: Form, fused: RowForm, span: int) -> int:
    """Return the bytes of a warp's span in the ring."""
    held = 0 if not form.group else span * _units(form) if form.group % (span * OUTPUTS) else 1  # groups of a span
    scales = (2 if form.minima else 1) * held * _SCALE_BYTES
    return fused.sides * (span * form.bits * _STEP_BYTES_OF_BIT + scales)


def _units(form: Form) -> int:
    """Return the units of a step, whose sums have scales of their own."""
    return {_SMALL_GROUP: 4, 32: 2}.get(form.group, 1)


def multiply_source(rows: int, dtype: torch.dtype) -> str:
    """Return the source of `multiply`: acc [64, rows] += values [64, 16] @ rows^T, by the matrix units of a warp group.

    https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
    """
    sums, kind = rows // 2, "f16" if dtype == torch.float16 else "bf16"
    targets = ", ".join(f"%{i}" for i in range(sums))
    values = ", ".join(f"%{sums + i}" for i in range(4))
    operands = ", ".join(f'"+f"(acc[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void multiply(float* acc, const u32* values, u64 tile_of_rows) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind}.{kind} "
               "{{{targets}}}, {{{values}}}, %{sums + 4}, 1, 1, 1, 0;"
               : {operands}
               : "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]), "l"(tile_of_rows));
}}
"""
