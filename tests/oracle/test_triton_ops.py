"""Triton's fused operations against the plain ones in float64, on the GPU or under the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from octavo.nn.attention import triton
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.triton import TritonAttention, rotate_and_write
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


@pytest.mark.parametrize("stream_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_sum_rms_norm(generator, dtype, stream_dtype, count):
    parts = torch.randn(count, 5, 96, generator=generator).to(dtype)
    stream = torch.randn(5, 96, generator=generator).to(stream_dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    there = stream.to(DEVICE, copy=True)
    normed = triton_norm.sum_rms_norm(parts.to(DEVICE), there, weight.to(DEVICE), 1e-5)
    total = stream.double() + parts.double().sum(0)
    rounding = 2 * torch.finfo(stream_dtype).eps
    torch.testing.assert_close(there.cpu().double(), total, atol=rounding, rtol=rounding)
    assert normed.dtype == dtype
    assert_close(normed, plain_norm(there.cpu(), weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [48, 2500])
def test_silu_mul(generator, dtype, size):
    gate_up = (torch.randn(3, 2 * size, generator=generator) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(triton_activation.silu_mul(gate_up.to(DEVICE)), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 96), (16, 16, 32), (0, 3, 64)])
@pytest.mark.parametrize("many", [1, 10**6], ids=["many", "few"])
def test_rotate_and_write(generator, dtype, normed, heads, kv_heads, dim, many, monkeypatch):
    """Queries are turned in place, keys and values reach their cells, and nothing else is written."""
    monkeypatch.setattr(triton, "MANY_WRITTEN", many)
    write = Writing(generator, dtype, heads, kv_heads, dim)
    for kept in (False, True):
        there, cells = write(normed, dtype, None, kept)
        assert_close(there[:, :heads], write.q)
        turned = there[:, heads : heads + kv_heads]
        if kept:
            assert_close(turned, write.k)
        else:
            assert torch.equal(turned.cpu(), write.qkv[:, heads : heads + kv_heads])
        assert torch.equal(there[:, heads + kv_heads :].cpu(), write.qkv[:, heads + kv_heads :])
        for token, cell in cells.items():
            assert_close(cell[0], write.k[token])
            assert torch.equal(cell[1].double(), write.v[token])


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("many", [1, 10**6], ids=["many", "few"])
def test_rotate_and_write_fp8(generator, kind, dim, many, monkeypatch):
    """Each head divided by its scale and rounded to nearest; what is too large becomes the largest number."""
    monkeypatch.setattr(triton, "MANY_WRITTEN", many)
    write = Writing(generator, torch.float32, 6, 3, dim)
    scales = torch.rand(2, 3, generator=generator) + 0.01
    scales[0, 1] = 1e-5 if kind == torch.float8_e5m2 else 1e-3
    _, cells = write(False, kind, scales, True)
    largest = torch.finfo(kind).max
    for token, cell in cells.items():
        for part, exact in enumerate((write.k, write.v)):
            wanted = (exact[token].float() / scales[part, :, None]).clamp(-largest, largest).to(kind).float()
            # The kernel's float32 arithmetic may fall on the other side of a tie.
            near = (cell[part].float() - wanted).abs() <= wanted.abs() / 4
            assert bool(near.all())
            assert (cell[part].float() != wanted).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 4, 128), (32, 8, 128), (14, 2, 64), (8, 4, 256)])
def test_many_tokens_are_written_as_few_are(generator, dtype, heads, kv_heads, dim, monkeypatch):
    """Bit for bit."""
    write = Writing(generator, dtype, heads, kv_heads, dim)
    found = []
    for many in (1, 10**6):
        monkeypatch.setattr(triton, "MANY_WRITTEN", many)
        there, cells = write(True, dtype, None, True)
        found.append([there, *cells.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Writing:
    """Random heads with what must come of them in float64, and where they go."""

    def __init__(self, generator, dtype, heads, kv_heads, dim):
        self.spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
        self.qkv = torch.randn(5, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        angles = torch.randn(50, dim // 2, generator=generator)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.weights = torch.randn(2, dim, generator=generator).to(dtype)
        self.positions = torch.randint(0, 50, (5,), generator=generator)
        self.slots = torch.randperm(64, generator=generator)[:5]
        self.slots[2] = -1

    def __call__(self, normed, kind, scales, kept):
        """Runs the kernel: the projection's output afterwards, and each token's cell [2, kv_heads, dim]."""
        spec = self.spec
        shape = TritonAttention(self.qkv.dtype, spec).cache_shape(spec, 4, 16)
        before = torch.full(shape, float("nan")).to(kind)
        there, cache = self.qkv.to(DEVICE, copy=True), before.to(DEVICE, copy=True)
        norms = (self.weights[0].to(DEVICE), self.weights[1].to(DEVICE), 1e-5) if normed else None
        scales = scales if scales is None else scales.to(DEVICE)
        rotate_and_write(there, norms, self.cos_sin.to(DEVICE), cache, scales, step(self.positions, self.slots), kept)

        q, k, self.v = self.qkv.double().split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if normed:
            q, k = plain_norm(q, self.weights[0]), plain_norm(k, self.weights[1])
        self.q, self.k = apply_rope(q.clone(), k.clone(), self.cos_sin.double(), self.positions)
        after = cache.cpu().transpose(2, 3)
        written = torch.zeros(4, 16, dtype=torch.bool)
        cells = {}
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                cells[token] = after[slot // 16, :, slot % 16]
                written[slot // 16, slot % 16] = True
        assert bool(after.transpose(1, 2)[~written].float().isnan().all())
        return there, cells


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
