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
    kind, count = _kind(dtype), columns // 2
    return f"""
__device__ __forceinline__ void {name}(float* acc, unsigned long long rows, unsigned long long matrix) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
               "{{{numbered(0, count)}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;"
               : {operands("acc", count)}
               : "l"(rows), "l"(matrix));
}}
"""


def fresh_tile_source(name: str, columns: int, dtype: torch.dtype) -> str:
    """Return the source of a function like that of `tile_source`, with a further argument: 0 to overwrite acc, 1 to
    add."""
    count = columns // 2
    return f"""
__device__ __forceinline__ void {name}(float* acc, unsigned long long rows, unsigned long long matrix, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{_kind(dtype)}.{_kind(dtype)} "
               "{{{numbered(0, count)}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
               : {operands("acc", count)}
               : "l"(rows), "l"(matrix), "r"(adds));
}}
"""


def mixed_source(name: str, columns: int, dtype: torch.dtype) -> str:
    """Return the source of a function: acc [64, columns] = weights [64, 16] @ values [16, columns], or added to it if
    `adds`. `weights` are in registers, four words of each thread; `values` are in shared memory, the numbers of a row
    adjacent."""
    count = columns // 2
    return f"""
__device__ __forceinline__ void {name}(float* acc, const unsigned* weights, unsigned long long values, int adds) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{_kind(dtype)}.{_kind(dtype)} "
               "{{{numbered(0, count)}}}, {{{numbered(count, 4)}}}, %{count + 4}, p, 1, 1, 1;\\n}}"
               : {operands("acc", count)}
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values), "r"(adds));
}}
"""


def _kind(dtype: torch.dtype) -> str:
    return "f16" if dtype == torch.float16 else "bf16"


def numbered(first: int, count: int) -> str:
    """Return the names of consecutive operands of an instruction."""
    return ", ".join(f"%{first + i}" for i in range(count))


def operands(name: str, count: int) -> str:
    """Return the constraints of an array whose elements are read and written."""
    return ", ".join(f'"+f"({name}[{i}])' for i in range(count))
