"""Launches that overlap on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_overlap(step: Callable[[Callable[[], None]], None], stream: Tensor) -> None:
    """Assert that overlapping launches of a graph give the same results as launches that wait for each other.

    Args:
        step: writes to `stream`, and calls its argument after each launch.
    """
    step(torch.cuda.synchronize)
    expected, graph = stream.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(lambda: None)
    for _ in range(3):
        graph.replay()
        torch.testing.assert_close(stream, expected, rtol=0, atol=0)
