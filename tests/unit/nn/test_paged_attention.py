"""The attention layer stores before it attends, in the cache that the worker bound."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.step import StepInput


class Recorder:
    """A backend that writes down what it is asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size)

    def prepare(self, step: StepInput, block_size: int) -> None:
        return None

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        self.calls.append(("write", cache))

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        self.calls.append(("attend", cache))
        return q + 1


def test_write_then_attend_on_the_bound_cache() -> None:
    backend = Recorder()
    layer = PagedAttention(AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5), backend)
    layer.cache = torch.zeros(3, 16)
    empty = torch.zeros(1, dtype=torch.long)
    step = StepInput(empty, empty, empty, empty, empty, empty, empty, 1, 1)
    q = torch.randn(1, 2, 4)
    out = layer(q, q[:, :1], q[:, :1], step)
    assert torch.equal(out, q + 1)
    assert [name for name, _ in backend.calls] == ["write", "attend"]
    assert all(cache is layer.cache for _, cache in backend.calls)
