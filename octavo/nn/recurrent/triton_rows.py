"""What the kernels of recurrent layers read of a step: each row's tokens, and the block of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    from octavo.nn.step import StepInput


@triton.jit
def place(row, query_start, seq_lens, tables, table_rows, table_stride, HAS_ROWS: tl.constexpr):
    """Return (first token, end, whether the row is no padding, whether its sequence began earlier, block).

    Padding has sequences of length 0. Its tokens are computed as zeros, and its block is that of another sequence.
    """
    first = tl.load(query_start + row)
    end = tl.load(query_start + row + 1)
    length = tl.load(seq_lens + row)
    entry = row
    if HAS_ROWS:
        entry = tl.load(table_rows + row)
    block = tl.load(tables + entry.to(tl.int64) * table_stride).to(tl.int64)
    return first, end, length > 0, length > end - first, block


def row_arguments(step: StepInput) -> dict[str, Any]:
    """Return the arguments of `place` but the row. Nothing is read from the device."""
    rows = step.table_rows
    return {
        "query_start": step.query_start,
        "seq_lens": step.seq_lens,
        "tables": step.block_tables,
        "table_rows": step.query_start if rows is None else rows,
        "table_stride": step.block_tables.stride(0),
        "HAS_ROWS": rows is not None,
    }
