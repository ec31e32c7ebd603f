"""Triton's fused operations against the plain ones in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.ops import triton_activation, triton_norm
from octavo.nn.ops.rope import apply_rope
from octavo.nn.step import StepInput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture
def generator():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    limit = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.cpu().double(), expected.double(), atol=limit, rtol=limit)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (2, 3, 128)], ids=str)
def test_rms_norm(generator, dtype, shape):
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    got = triton_norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert got.dtype == dtype
    assert_close(got, plain_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(generator, dtype):
    x, residual = (torch.randn(4, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype)
    there = x.to(DEVICE, copy=True)
    normed, total = triton_norm.add_rms_norm(there, residual.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert total.data_ptr() == there.data_ptr()
    assert_close(total, (x + residual))
    assert_close(normed, plain_norm(x + residual, weight))


def test_add_rms_norm_to_a_float32_residual(generator):
    x = torch.randn(4, 96, generator=generator).to(torch.float16)
    residual, weight = torch.randn(4, 96, generator=generator), torch.randn(96, generator=generator).to(torch.float16)
    there, kept = x.to(DEVICE, copy=True), residual.to(DEVICE, copy=True)
    normed, total = triton_norm.add_rms_norm(there, kept, weight.to(DEVICE), 1e-5)
    assert torch.equal(there.cpu(), x)
    assert torch.equal(kept.cpu(), residual)
    assert torch.equal(total.cpu(), x.float() + residual)
    assert normed.dtype == torch.float16
    assert_close(normed, plain_norm(x.float() + residual, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 2500])
def test_silu_mul(generator, dtype, size):
    gate_up = (torch.randn(3, 2 * size, generator=generator) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(triton_activation.silu_mul(gate_up.to(DEVICE)), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 96), (16, 16, 32)])
def test_rotate_and_write(generator, dtype, normed, heads, kv_heads, dim):
    """Queries are turned in place, keys and values reach their cells, and nothing else is written."""
    tokens, page, blocks = 5, 16, 4
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    backend = TritonAttention(dtype, spec)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    angles = torch.randn(50, dim // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.randn(2, dim, generator=generator).to(dtype)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    slots = torch.randperm(page * blocks, generator=generator)[:tokens]
    slots[2] = -1
    cache = torch.full(backend.cache_shape(spec, blocks, page), float("nan"), dtype=dtype)
    there, cache_there = qkv.to(DEVICE, copy=True), cache.to(DEVICE, copy=True)
    norms = (weights[0].to(DEVICE), weights[1].to(DEVICE), 1e-5) if normed else None
    backend.rotate_and_write(there, norms, cos_sin.to(DEVICE), cache_there, step(positions, slots))

    q, k, v = qkv.double().split([heads, kv_heads, kv_heads], dim=1)
    if normed:
        q, k = plain_norm(q, weights[0]), plain_norm(k, weights[1])
    q, k = apply_rope(q.clone(), k.clone(), cos_sin.double(), positions)
    assert_close(there[:, :heads], q)
    assert torch.equal(there[:, heads:].cpu(), qkv[:, heads:])
    cells = cache_there.cpu().transpose(2, 3)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cell = cells[slot // page, :, slot % page]
            assert_close(cell[0], k[token])
            assert torch.equal(cell[1].double(), v[token])
    assert cells.isnan().sum() == cells.numel() - 4 * 2 * kv_heads * dim


def step(positions: torch.Tensor, slots: torch.Tensor) -> StepInput:
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    return StepInput(
        input_ids=nothing.long(),
        positions=positions.to(DEVICE),
        query_start=nothing,
        seq_lens=nothing,
        block_tables=nothing,
        slot_mapping=slots.to(DEVICE),
        logit_rows=nothing.long(),
        max_query_len=1,
        max_seq_len=1,
    )
