"""Attention of prompts by the CUDA kernel against float64, with inputs that differ with every run."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor

from octavo.nn.attention import prompt_tiles
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.reference import attend_dense
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.step import StepInput

GPU = torch.device("cuda")
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
SPEC = AttentionSpec(4, 2, 128, 128**-0.5)


@dataclass(frozen=True)
class Case:
    """Rows with `counts` tokens after `past` others. Cells without a key are NaN, and blocks are in random order."""

    spec: AttentionSpec
    counts: Sequence[int]
    past: Sequence[int]
    qkv: Tensor
    cache: Tensor
    step: StepInput
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def q(self) -> Tensor:
        return self.qkv[:, : self.spec.num_heads]

    def attend(self, tiles: Tensor | None = None) -> Tensor:
        """Return what the kernel computes, NaN where it writes nothing."""
        out = torch.full(self.q.shape, float("nan"), dtype=self.qkv.dtype, device=GPU)
        fresh = self.qkv[:, self.spec.num_heads :]
        assert prompt_tiles.serves(self.q, fresh, self.cache, self.step, self.spec)
        tiles = self.step.attn.many.tiles if tiles is None else tiles
        prompt_tiles.attend(self.q, self.cache, self.step, self.spec, tiles, out)
        return out

    def deviation(self, out: Tensor, row: int) -> float:
        start = sum(self.counts[:row])
        own = slice(start, start + self.counts[row])
        expected = attend_dense(self.q[own], self.keys[row], self.values[row], self.spec)
        return float((out[own].double() - expected).norm() / expected.norm())


def case(
    counts: Sequence[int],
    past: Sequence[int],
    spec: AttentionSpec = SPEC,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    *,
    moved: bool = False,
) -> Case:
    """Make a case; with `moved`, rows' block tables are in another order."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    some = torch.Generator(GPU).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=some, device=GPU).to(dtype)

    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    lengths = [count + before for count, before in zip(counts, past, strict=True)]
    width = max(lengths) // page + 1
    tables = torch.randperm(len(counts) * width, generator=some, device=GPU).view(len(counts), width).int()
    qkv = normal(sum(counts), heads + 2 * kv_heads, dim)
    cache = torch.full((len(counts) * width, 2, kv_heads, page, dim), float("nan"), dtype=dtype, device=GPU)
    keys, values = [], []
    for row, (start, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
        both = normal(2, lengths[row], kv_heads, dim)
        own = qkv[start : start + count, heads:]
        both[:, past[row] :] = torch.stack([own[:, :kv_heads], own[:, kv_heads:]])
        places = torch.arange(lengths[row], device=GPU)
        cache[tables[row][places // page].long(), :, :, places % page] = both.transpose(0, 1)
        keys.append(both[0])
        values.append(both[1])
    order = torch.randperm(len(counts), generator=some, device=GPU) if moved else torch.arange(len(counts), device=GPU)
    places = torch.arange(sum(counts), device=GPU)
    step = StepInput(
        input_ids=places,
        positions=places,
        query_start=torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32, device=GPU),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=GPU),
        block_tables=tables[order],
        table_rows=order.argsort().int() if moved else None,
        slot_mapping=places,
        logit_rows=places[:1],
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        query_lens=counts,
        past_lens=past,
    )
    step.attn = TritonAttention(dtype, spec).prepare(step, page)
    return Case(spec, counts, past, qkv, cache, step, keys, values)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_rows(dim: int, page: int, dtype: torch.dtype) -> None:
    """Rows that end before, at and after the ends of tiles, of queries and of keys in the cache."""
    counts, past = [300, 17, 128, 129, 500, 2, 65, 64], [0, 5, 128, 16, 1000, 127, 64, 129]
    one = case(counts, past, replace(SPEC, head_dim=dim, scale=dim**-0.5), dtype, page)
    out = one.attend()
    assert max(one.deviation(out, row) for row in range(len(counts))) < TOLERANCE[dtype]


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (8, 8), (32, 4)])
def test_heads_and_moved_tables(heads: int, kv_heads: int) -> None:
    """More and fewer items than blocks; block tables are looked up."""
    spec = replace(SPEC, num_heads=heads, num_kv_heads=kv_heads)
    counts, past = [random.randrange(2, 900) for _ in range(9)], [random.randrange(900) for _ in range(9)]
    one = case(counts, past, spec, moved=True)
    out = one.attend()
    assert max(one.deviation(out, row) for row in range(len(counts))) < TOLERANCE[torch.bfloat16]


def test_a_long_context() -> None:
    one = case([700, 300], [20_000, 0])
    out = one.attend()
    assert max(one.deviation(out, row) for row in (0, 1)) < TOLERANCE[torch.bfloat16]


def test_rows_of_one_query_are_left_alone() -> None:
    """And tiles of padding."""
    one = case([200, 1, 150], [30, 500, 0])
    padding = torch.tensor([1, 128, 0, 256], dtype=torch.int32, device=GPU)
    out = one.attend(torch.cat([one.step.attn.many.tiles.flatten(), padding]))
    assert out[200].isnan().all()
    assert max(one.deviation(out, row) for row in (0, 2)) < TOLERANCE[torch.bfloat16]


def test_a_bad_row_harms_no_other() -> None:
    """Its keys and values are next to theirs in the projection."""
    one = case([200, 150, 100], [0, 40, 10])
    one.qkv[200:350] = float("nan")
    out = one.attend()
    assert max(one.deviation(out, row) for row in (0, 2)) < TOLERANCE[torch.bfloat16]
    assert out[200:350].isnan().all()


@pytest.mark.parametrize(
    "change", [{"window": 64}, {"soft_cap": 30.0}, {"slopes": (0.5,) * 4}, {"sinks": True}], ids=str
)
def test_other_layers_stay_in_triton(change: dict[str, Any]) -> None:
    one = case([200], [10])
    spec = replace(SPEC, **change)
    assert not prompt_tiles.serves(one.q, one.qkv[:, 4:], one.cache, one.step, spec)


def test_the_backend_takes_it() -> None:
    """Its results for a step differ from Triton's by rounding."""
    one = case([500, 3, 200], [100, 9, 0])
    backend = TritonAttention(torch.bfloat16, SPEC)
    still = torch.cat([torch.ones(1000, 64), torch.zeros(1000, 64)], dim=1).to(GPU)
    cells = torch.full((len(one.qkv),), -1, device=GPU)
    step = replace(one.step, slot_mapping=cells, attn=one.step.attn)
    out = backend.rotate_and_attend(one.qkv.clone(), None, still, one.cache, None, step, SPEC)
    assert torch.equal(out, one.attend())
