"""What the machine can do at all: reading memory and multiplying matrices; the best of several, in this process.

Run as a program with the cores' numbers as its arguments, it prints JSON. It needs torch.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_SIZES = ((256, 1536, 1536), (1024, 1024, 1024), (2048, 2048, 2048))
_BEST_OF = 9
_LONG_S = 1.0  # what takes longer is repeated no more, and no larger product is tried


def measure(cores: list[int]) -> dict[str, float]:
    """read_gb_s: summing 1 GiB of float32, in large pages where the system has them. *_gop_s: the fastest of some
    matrix products, 2 * M * N * K operations; int8 is unsigned activations times signed weights, as quantized linear
    layers do it."""
    os.sched_setaffinity(0, cores)
    import torch

    torch.set_num_threads(len(cores))
    memory = _floats(1 << 28)
    found = {"read_gb_s": memory.nbytes / _best(memory.sum) / 1e9}
    del memory
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found[f"{name}_gop_s"] = _fastest(lambda size, dtype=dtype: _float_product(size, dtype))
    # A processor without instructions for bfloat16 multiplies it as float32; torch then takes a hundred times as long.
    found["bfloat16_gop_s"] = max(found["bfloat16_gop_s"], found["float32_gop_s"])
    found["int8_gop_s"] = _fastest(_int8_product)
    return {name: round(value, 1) for name, value in found.items()}


def _floats(count: int) -> Any:
    import torch

    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def _float_product(size: tuple[int, int, int], dtype: Any) -> Callable[[], Any]:
    import torch

    m, n, k = size
    a, b = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
    return lambda: torch.nn.functional.linear(a, b)


def _int8_product(size: tuple[int, int, int]) -> Callable[[], Any]:
    import torch

    m, n, k = size
    a = torch.ones(m, k, dtype=torch.uint8)
    weight = torch.ops.onednn.qlinear_prepack(torch.ones(n, k, dtype=torch.int8), None)
    scales, zeros = torch.ones(n), torch.zeros(n, dtype=torch.int64)

    def product() -> Any:
        return torch.ops.onednn.qlinear_pointwise(
            a, 1.0, 0, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )

    return product


def _fastest(product_of: Callable[[tuple[int, int, int]], Callable[[], Any]]) -> float:
    """The highest rate of products of these sizes, in 1e9 operations a second."""
    rate = 0.0
    for m, n, k in _SIZES:
        seconds = _best(product_of((m, n, k)))
        rate = max(rate, 2 * m * n * k / seconds / 1e9)
        if seconds > _LONG_S:
            break
    return rate


def _best(work: Callable[[], Any]) -> float:
    """The least seconds of some runs, or of the first if it is long."""
    least = float("inf")
    for _ in range(_BEST_OF):
        started = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - started)
        if least > _LONG_S:
            break
    return least


def best(readings: list[dict[str, float]]) -> dict[str, float]:
    """The highest of each: what others take away at times is no limit of the machine."""
    return {name: max(reading[name] for reading in readings) for name in readings[0]}


if __name__ == "__main__":
    print(json.dumps(measure([int(word) for word in sys.argv[1:]])))
