"""Products with a matrix of 4- or 8-bit numbers on a GPU; the kernels and the layout are in `triton_words.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.nn.ops.tables import PLANES, numbers_in, planes_in
from octavo.nn.ops.triton_overlap import overlap
from octavo.nn.ops.triton_sum import sum_parts
from octavo.nn.ops.triton_words import widen_kernel, words_rows_kernel


@dataclass(frozen=True, slots=True)
class Words:
    """A matrix [N, K] of small numbers: value = scale * number + minimum.

    Attributes:
        codes: [N, blocks, width] int16; the last block is filled up with zeros.
        scales: [N, G], for groups of `group` inputs.
        minima: likewise, or None if all are 0.
        order: [K] int32: input of the layer that the matrix's column multiplies; None if they are in order.
        outputs, inputs: N and K.
        bits: 4 or 8.
        group: a divisor or a multiple of a block's inputs, or all inputs.
        kind: what a code stands for: an integer, plus 2 ** (bits - 1); a place in a table of 16 numbers; or an 8-bit
            float.
        book: of a table, else None; see `tables.py`.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    order: Tensor | None
    outputs: int
    inputs: int
    bits: int
    group: int
    kind: Literal["integers", "table", "e4m3", "e5m2"] = "integers"
    book: Tensor | None = None

    @property
    def has_minima(self) -> bool:
        return self.minima is not None

    @property
    def width(self) -> int:
        """Words of a block."""
        return self.codes.shape[2]

    @property
    def table(self) -> Tensor | None:
        """The numbers [16] in float16."""
        return None if self.book is None else numbers_in(self.book)

    def looked_up(self, x: Tensor, *, scaled: bool) -> tuple[str, Tensor | None]:
        """Return how a kernel that multiplies x looks up numbers: KIND and the book of `triton_words.py`."""
        if self.book is None or scaled or not x.is_cuda or x.dtype not in PLANES:
            return self.kind, self.table
        return "planes", planes_in(self.book, x.dtype)


def product(x: Tensor, words: Words, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ W^T + bias: [M, N], rounded once to `dtype`; x in the matrix's order of inputs."""
    plan = rows_plan(words, x)
    if plan.parts == 1 and bias is None:
        return rows_product(x, words, plan, dtype)[0]
    return sum_parts(rows_product(x, words, plan, torch.float32), bias, dtype)


def rows_product(x: Tensor, words: Words, plan: RowsPlan, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ W^T in parts over the inputs, whose sum it is: [plan.parts, M, N].

    Args:
        x: contiguous, in the matrix's order of inputs.
    """
    rows, outputs = x.shape[0], words.outputs
    scaled = plan.scaled or words.has_minima
    kind, book = words.looked_up(x, scaled=scaled)
    out = torch.empty(plan.parts, rows, outputs, dtype=dtype, device=x.device)
    words_rows_kernel[(cdiv(outputs, plan.block_n), plan.parts, cdiv(rows, plan.block_m))](
        x,
        words.codes,
        words.scales,
        words.scales if words.minima is None else words.minima,
        book,
        out,
        rows,
        N=outputs,
        K=words.inputs,
        BITS=words.bits,
        KIND=kind,
        WIDTH=words.width,
        GROUP=words.group,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        PARTS_OF_K=plan.parts,
        MINIMA=words.has_minima,
        SCALED=scaled,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlap(x.device),
    )
    return out


def widen(words: Words, out: Tensor) -> Tensor:
    """Write the matrix's values to out [N, K], in its order of inputs, and return it."""
    plan = _WIDENED if out.is_cuda else WidenPlan(64, 4, 1)
    blocks = words.codes.shape[1]
    grid = (cdiv(words.outputs, plan.block_n), cdiv(blocks, plan.block_b))
    widen_kernel[grid](
        words.codes,
        words.scales,
        words.scales if words.minima is None else words.minima,
        words.table,
        out,
        N=words.outputs,
        K=words.inputs,
        BITS=words.bits,
        KIND=words.kind,
        WIDTH=words.width,
        GROUP=words.group,
        BLOCK_N=plan.block_n,
        BLOCK_B=plan.block_b,
        MINIMA=words.has_minima,
        num_warps=plan.warps,
        **overlap(out.device),
    )
    return out


class WidenPlan(NamedTuple):
    """Matrix rows and blocks of a program's pass, and its warps."""

    block_n: int
    block_b: int
    warps: int


class RowsPlan(NamedTuple):
    """How programs divide a product of several rows.

    Attributes:
        block_m, block_n: rows and outputs of a program.
        parts: programs that share an output's inputs.
        scaled: scale the matrix's values rather than sums of groups.
    """

    block_m: int
    block_n: int
    parts: int
    warps: int
    stages: int
    scaled: bool = False


_WIDENED = WidenPlan(4, 4, 4)
_SMALL = 64
"""Most rows of a tile of small programs, several on each multiprocessor."""
_MOST_PARTS = 8
_PROGRAMS = 400
"""Programs of a product that keep an H200 busy."""


def rows_plan(words: Words, x: Tensor) -> RowsPlan:
    """Return how programs divide the product with x [M, K], as measured on an H200: enough of them to read at full
    speed."""
    rows, blocks = x.shape[0], words.codes.shape[1]
    if not x.is_cuda:
        return RowsPlan(16 if rows <= 16 else 64, 128, 2 if blocks > 1 else 1, 1, 1)
    if rows > _SMALL and x.dtype.itemsize == 2 and words.kind != "table":  # which would spill in larger tiles
        block_m, block_n, warps, stages = 128, 128, 8, 2
    else:
        block_m, block_n, warps, stages = min(_SMALL, max(16, next_power_of_2(rows))), 64, 4, 3
    programs = cdiv(words.outputs, block_n) * cdiv(rows, block_m)
    wanted = min(_MOST_PARTS, _PROGRAMS * 64 // block_n // programs, blocks // 2)
    parts = 1 << max(0, wanted.bit_length() - 1)
    return RowsPlan(block_m, block_n, parts, warps, 5 if parts > 1 and block_m <= 32 else stages)
