"""Measure a machine's limits: copy bandwidth and rate of matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from octavo.device.host import physical_cores


def measure_ceilings(device: str, dtype: str) -> tuple[float, float]:
    """Return bytes read and written per second by a large copy, and operations per second of a large matrix product.

    Needs 1 GiB on a GPU.

    Args:
        device: "cuda" or "cpu".
        dtype: the name of a torch dtype.
    """
    gpu = device == "cuda"
    source = torch.randint(0, 255, (1 << (29 if gpu else 27),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if gpu else 1024
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    wait = torch.cuda.synchronize if gpu else lambda: None
    threads = torch.get_num_threads()  # one, if the model runs in native kernels
    torch.set_num_threads(physical_cores())
    try:
        copied = _seconds(lambda: target.copy_(source), wait)
        multiplied = _seconds(lambda: a @ b, wait)
    finally:
        torch.set_num_threads(threads)
    return 2 * source.numel() / copied, 2 * size**3 / multiplied


def _seconds(run: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return the median of several runs, after two warm-up runs."""
    taken = []
    for _ in range(9):
        wait()
        began = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])
