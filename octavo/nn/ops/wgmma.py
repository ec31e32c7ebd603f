"""The source of products of 16-bit numbers by the matrix units of a Hopper GPU's warp group.

https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions-wgmma-mma
"""

from __future__ import annotations

import torch


def tile_source(name: str, columns: int, dtype: torch.dtype) -> str:
    """Return the source of a function: acc [64, columns] += rows [64, 16] @ matrix [columns, 16]^T. `rows` and `matrix`
    are in shared memory.

    Args:
        columns: a multiple of 8, up to 256.
    """
    kind = "f16" if dtype == torch.float16 else "bf16"
    count = columns // 2
    return f"""
__device__ __forceinline__ void {name}(float* acc, unsigned long long rows, unsigned long long matrix) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
               "{{{numbered(0, count)}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
               : {operands("acc", count)}
               : "l"(rows), "l"(matrix));
}}
"""


def numbered(first: int, count: int) -> str:
    """Return the names of consecutive operands of an instruction."""
    return ", ".join(f"%{first + i}" for i in range(count))


def operands(name: str, count: int) -> str:
    """Return the constraints of an array whose elements are read and written."""
    return ", ".join(f'"+f"({name}[{i}])' for i in range(count))
