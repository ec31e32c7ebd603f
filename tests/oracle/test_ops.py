"""Fused operations against float64, with inputs that differ with every run."""

from __future__ import annotations

import os

import pytest
import torch

from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.norm import add_rms_norm, rms_norm
from octavo.nn.ops.rope import apply_rope, apply_rope_joint

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of values of order 1: float32 sums, and one rounding to the dtype (two where an operation has two outputs in a row).
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def generator(request):
    seed = int.from_bytes(os.urandom(4), "little")
    request.node.user_properties.append(("seed", seed))
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (2, 3, 128)], ids=str)
def test_rms_norm(generator, dtype, shape):
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    before = x.clone()
    assert_close(rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_large_values_does_not_overflow(generator, dtype):
    x = torch.full((2, 64), 1000.0).to(dtype)
    assert_close(rms_norm(x, torch.ones(64, dtype=dtype), 1e-6), torch.ones(2, 64, dtype=torch.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(generator, dtype):
    x, residual = (torch.randn(5, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype)
    total, kept = x + residual, residual.clone()
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert torch.equal(residual, kept)
    assert_close(normed, plain_norm(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(generator, dtype):
    gate_up = torch.randn(6, 2, 64, generator=generator).flatten(1).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    before = gate_up.clone()
    got = silu_mul(gate_up)
    assert_close(got, gate / (1 + (-gate).exp()) * up, dtype)
    assert got.is_contiguous()
    assert torch.equal(gate_up, before)


def plain_rope(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair of channels as a complex number, turned by its angle: [T, H, D] and [T, rotary_dim / 2]."""
    x = x.double()
    half = angles.shape[1]
    turned = (
        torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [16, 64])
@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
def test_rope(generator, dtype, rotary_dim, joint):
    heads, kv_heads, dim, tokens = 6, 2, 64, 9
    positions = torch.randint(0, 500, (tokens,), generator=generator)
    speeds = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    table = torch.arange(500, dtype=torch.float64)[:, None] * speeds
    cos_sin = torch.cat([table.cos(), table.sin()], dim=1).float()
    fused = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    q, k, v = fused.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    expected_q, expected_k = (plain_rope(x, table[positions]) for x in (q, k))
    values = v.clone()
    if joint:
        qk = apply_rope_joint(fused.unflatten(1, (-1, dim))[:, : heads + kv_heads], cos_sin, positions)
        q, k = qk.split([heads, kv_heads], dim=1)
    else:
        q, k = apply_rope(q, k, cos_sin, positions)
    assert_close(q, expected_q, dtype)
    assert_close(k, expected_k, dtype)
    assert torch.equal(v, values)
