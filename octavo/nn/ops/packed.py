"""Products with packed matrices on a GPU: which kernel multiplies a number of rows, and memory for widened matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.ops import few_fragments, floats, fragments, products, row8, words
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.floats import Floats
from octavo.nn.ops.fragments import Fragments
from octavo.nn.ops.words import Words
from octavo.nn.rounded import Rounded

Integers = Words | Fragments
Matrix = Integers | Floats

FEW_WORDS = 256
"""Most rows that are multiplied by kernels that read `Words`; the library multiplies more by widened ones."""
FEW_FLOATS = 16
"""Most rows that are multiplied without rounding them to 8 bits."""
FEW_LEFT = 64
"""The same, if the product may be left in parts."""


class Scratch:
    """Memory for one widened matrix at a time. All layers share it, since their products run one after another on one
    stream."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def reserve(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have at least `size` elements. Call it before steps are recorded: growing changes the address."""
        held = self._memory.get((device, dtype))
        if held is None or held.numel() < size:
            self._memory.pop((device, dtype), None)
            self._memory[device, dtype] = torch.empty(size, dtype=dtype, device=device)

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [rows, columns] of the memory, without values."""
        self.reserve(rows * columns, dtype, device)
        return self._memory[device, dtype][: rows * columns].view(rows, columns)


SCRATCH = Scratch()


def product(x: Tensor | Rounded, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x [M, K] @ W^T + bias: [M, N], rounded once to `dtype`."""
    if isinstance(x, Rounded):
        assert isinstance(matrix, Floats), "only products in 8 bits take rounded activations"
        return floats.rounded_product(x, matrix, bias, dtype)
    rows = x.shape[0]
    if not rows:
        return torch.empty(0, matrix.outputs, dtype=dtype, device=x.device)
    if isinstance(matrix, Floats):
        x = x.contiguous()
        if row8.serves_rows(rows, matrix, x.dtype):
            return row8.rows_product(x, matrix, bias, dtype, x.dtype)
        if rows <= FEW_FLOATS or (matrix.tile and not floats.multiplies_tiles(x.device)):
            return floats.product(x, matrix, bias, dtype)
        if matrix.tile:
            return floats.tiled_product(x, matrix, bias, dtype)
        rounded = floats.round_rows(x, matrix.rounded_dtype, matrix.inverse)
        return floats.rounded_product(rounded, matrix, bias, dtype)
    x = in_order(x, matrix)
    if isinstance(matrix, Fragments) and few_fragments.serves(matrix, rows, x.dtype):
        return few_fragments.product(x, matrix, bias=bias, dtype=dtype)
    if isinstance(matrix, Fragments):
        return fragments.product(x, matrix, bias, dtype)
    if rows <= FEW_WORDS:
        return words.product(x, matrix, bias, dtype)
    return products.linear(x, widened(matrix, x), bias, dtype)


def gated_product(x: Tensor, matrix: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return silu(first half) * second half of x [M, K] @ W^T + bias: [M, N / 2]."""
    rows = x.shape[0]
    if isinstance(matrix, Fragments) and few_fragments.serves(matrix, rows, x.dtype, gated=True):
        return few_fragments.product(in_order(x, matrix), matrix, bias=bias, gated=True, dtype=dtype)
    if isinstance(matrix, Fragments) and rows:
        return fragments.product(in_order(x, matrix), matrix, bias, dtype, gated=True)
    if isinstance(matrix, Floats) and row8.serves_rows(rows, matrix, x.dtype, gated=True):
        return row8.rows_product(x.contiguous(), matrix, bias, dtype, x.dtype, gated=True)
    return silu_mul(product(x, matrix, bias, dtype))


def parts(x: Tensor, matrix: Matrix) -> Tensor | None:
    """Return x [M, K] @ W^T in parts over the inputs, [P, M, N] in float32 or x's dtype; None if that is not faster."""
    rows = x.shape[0]
    if not rows:
        return None
    if isinstance(matrix, Fragments):
        divided = fragments.rows_plan(matrix, rows)
        return fragments.rows_product(in_order(x, matrix), matrix, divided, fragments.dtype_of_parts(x))
    if rows > (FEW_WORDS if isinstance(matrix, Words) else FEW_LEFT):
        return None
    if isinstance(matrix, Words):
        return words.rows_product(in_order(x, matrix), matrix, words.rows_plan(matrix, x), torch.float32)
    return floats.rows_product(x.contiguous(), matrix, floats.rows_plan(matrix, rows, x.device), torch.float32)


def add_few(stream: Tensor, x: Tensor, matrix: Matrix) -> bool:
    """Add x [M, K] @ W^T to stream [M, N], in place, in the product's launch; return whether a kernel does that."""
    rows = x.shape[0]
    if isinstance(matrix, Floats) and row8.serves_rows(rows, matrix, x.dtype):
        row8.rows_product(x.contiguous(), matrix, None, stream.dtype, x.dtype, add_to=stream)
        return True
    if isinstance(matrix, Fragments) and few_fragments.serves(matrix, rows, x.dtype):
        few_fragments.product(in_order(x, matrix), matrix, add_to=stream)
        return True
    return False


def in_order(x: Tensor, matrix: Integers) -> Tensor:
    """Return x [M, K] with its columns in the matrix's order, contiguous."""
    return x.contiguous() if matrix.order is None else x.index_select(1, matrix.order)


def widened(matrix: Words, x: Tensor) -> Tensor:
    """Return the matrix's values [N, K] in x's dtype, in its order of inputs, until the next call."""
    return words.widen(matrix, SCRATCH.matrix(matrix.outputs, matrix.inputs, x.dtype, x.device))
