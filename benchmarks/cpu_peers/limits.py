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
        found[f"{name}_gop_s"] = max(_gop_s(size, _float_product(size, dtype)) for size in _SIZES)
    found["int8_gop_s"] = max(_gop_s(size, _int8_product(size)) for size in _SIZES)
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


def _gop_s(size: tuple[int, int, int], product: Callable[[], Any]) -> float:
    m, n, k = size
    return 2 * m * n * k / _best(product) / 1e9


def _best(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(_BEST_OF):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def best(readings: list[dict[str, float]]) -> dict[str, float]:
    """The highest of each: what others take away at times is no limit of the machine."""
    return {name: max(reading[name] for reading in readings) for name in readings[0]}


if __name__ == "__main__":
    print(json.dumps(measure([int(word) for word in sys.argv[1:]])))
