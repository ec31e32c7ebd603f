"""Rows that are rounded to E4M3 with a static scale, by all kernels that round, and their products.

On the GPU or under the interpreter.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import ragged
import torch

pytest.importorskip("triton")

from quantized_kit import codes_of
from test_packed_products import DEVICE, DTYPE, GPU, TOLERANCE, Doubled, off
from test_triton_attention import DRAFTS, FEW, HALF, LONGEST, MANY, fresh_seed, groups_of
from torch import Tensor
from torch.nn import functional as F

from octavo.models.load.weights import replace_weights
from octavo.nn.attention import fused_decode
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.ops import floats, packed
from octavo.nn.ops.floats import DTYPE as E4M3
from octavo.nn.ops.floats import Floats
from octavo.nn.quant.base import Part
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.rounded import Rounded
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream

ROWS = (17, 33, 64, 257)
SCALE = 0.0123
"""The largest number is 5.5, which a few random ones exceed."""


def inverse_of(scale: float) -> Tensor:
    return torch.tensor([1.0 / scale], device=DEVICE)


def nearest(x: Tensor, scale: float) -> Tensor:
    """The bits of x / scale, in float32 times the inverse as kernels compute it, by torch's own conversion."""
    return (x.cpu().float() * torch.tensor(1.0 / scale)).clamp(-448, 448).to(E4M3).view(torch.uint8)


def bits(made: Rounded) -> Tensor:
    assert made.scales is None
    return made.codes.view(torch.uint8).cpu()


def nearly(found: Tensor, expected: Tensor) -> None:
    """Whether bits are the same but for a few that stand for an adjacent number, since sums were added in another
    order."""
    apart = found.int() - expected.int()
    assert int(apart.abs().max()) <= 1
    assert float((apart != 0).float().mean()) < (0.02 if GPU else 0.001)


def matrix_of(outputs: int, inputs: int, scale: float = SCALE) -> Floats:
    blocks = codes_of("e4m3", 0, outputs, inputs)
    codes, scales = blocks.values.view(E4M3), blocks.scales[:, 0]
    return Floats(codes.to(DEVICE), scales.to(DEVICE)).with_input_scale(scale)


@pytest.mark.parametrize("dtype", dict.fromkeys((DTYPE, torch.float16)), ids=str)
def test_rows_are_rounded_to_the_nearest_number(dtype: torch.dtype) -> None:
    """With ties, subnormal numbers, and numbers beyond the largest; inputs that are no power of two."""
    x = torch.randn(37, 336) * torch.exp2(torch.randint(-14, 4, (37, 336)))
    x[0, :5] = torch.tensor([0.0, -0.0, 3e4, -3e4, 448 * SCALE])
    numbers = torch.arange(126, dtype=torch.uint8).view(E4M3).float()
    x[1, :125] = (numbers[1:] + numbers[:-1]) / 2  # ties, with a scale of 1
    x = x.to(dtype)
    for scale in (SCALE, 1.0):
        made = floats.round_rows(x.to(DEVICE), inverse=inverse_of(scale))
        assert torch.equal(bits(made), nearest(x, scale))
    assert not floats.round_rows(x[:0].to(DEVICE), inverse=inverse_of(1.0)).codes.numel()


@pytest.mark.parametrize("rows", ROWS)
def test_norms_and_gates_round(rows: int) -> None:
    size, inverse = 208, inverse_of(SCALE)
    x, residual = (torch.randn(rows, size).to(DTYPE) for _ in range(2))
    weight = (torch.rand(size) + 0.5).to(DTYPE)
    norm = floats.RoundedNorm(weight.to(DEVICE), 1e-5, inverse=inverse)

    def normed(total: Tensor) -> Tensor:
        wide = total.double()
        return nearest(wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double(), SCALE)

    total = (x.float() + residual.float()).to(DTYPE)
    nearly(bits(norm(x.to(DEVICE))), normed(x))
    made, found = norm.add(x.to(DEVICE, copy=True), residual.to(DEVICE))
    nearly(bits(made), normed(total))
    assert torch.equal(found.cpu(), total)
    parts, stream = torch.stack([x / 2, x / 2]).to(DEVICE), residual.to(DEVICE, copy=True)
    nearly(bits(norm.after(parts, stream)), normed(total))
    torch.testing.assert_close(stream.cpu(), total)
    gate_up = torch.randn(rows, 2 * size).to(DTYPE)
    gate, up = gate_up.double().chunk(2, 1)
    nearly(bits(floats.round_gated(gate_up.to(DEVICE), inverse=inverse)), nearest((F.silu(gate) * up).to(DTYPE), SCALE))


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rows", ROWS)
def test_products(rows: int, biased: bool) -> None:
    """Of what rows were rounded to, in float64."""
    matrix, x = matrix_of(64, 224), torch.randn(rows, 224).to(DTYPE)
    bias = torch.randn(64).to(DTYPE) if biased else None
    values = nearest(x, SCALE).view(E4M3).double() * SCALE
    expected = values @ (matrix.codes.cpu().double() * matrix.scales.cpu().double()[:, None]).T
    expected += 0 if bias is None else bias.double()
    found = packed.product(x.to(DEVICE), matrix, None if bias is None else bias.to(DEVICE), torch.float32)
    assert off(found, expected) < TOLERANCE


def test_few_rows_are_not_rounded() -> None:
    matrix = matrix_of(64, 224, scale=100.0)  # which would leave nothing
    for rows in (1, 7, 16):
        x = torch.randn(rows, 224).to(DTYPE)
        expected = x.double() @ matrix.values().cpu().double().T
        assert off(packed.product(x.to(DEVICE), matrix, None, torch.float32), expected) < TOLERANCE
    x = torch.randn(64, 224).to(DTYPE)
    parts = packed.parts(x.to(DEVICE), matrix)
    assert parts is not None
    assert off(parts.sum(0), x.double() @ matrix.values().cpu().double().T) < TOLERANCE


def test_scales_of_rows_are_kept_up_to_a_number() -> None:
    assert floats.ones(5, DEVICE).data_ptr() == floats.ones(70, DEVICE).data_ptr()
    for rows in (1, 1 << 16, (1 << 16) + 3):
        found = floats.ones(rows, DEVICE)
        assert found.shape == (rows, 1)
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert bool((found == 1).all())


def layer(parts: list[Part], scale: float, **options: Any) -> tuple[Linear, Tensor]:
    """A layer with a static scale, and its matrix in float64."""
    scheme = PackedOnGpu(DTYPE, DEVICE, rounds=True)
    made = Linear("", DEVICE, parts, NONE, scheme, **options)
    blocks = [codes_of("e4m3", 0, part.out_features, part.in_features) for part in parts]
    object.__setattr__(blocks[0], "input_scale", lambda: scale / 2)
    for one in blocks[1:] or blocks:
        object.__setattr__(one, "input_scale", lambda: scale)
    made.place(blocks)
    assert scheme.matrix is not None
    return made, scheme.matrix.values().cpu().double()


def rounded(x: Tensor, scale: float) -> Tensor:
    return nearest(x, scale).view(E4M3).double() * scale


@pytest.mark.parametrize("pending", ["nothing", "an output", "parts"])
def test_through_layers(pending: str) -> None:
    """The operation before rounds with the scale of the product after it."""
    rows, size = packed.FEW_LEFT + 1, 64
    up, wide = layer([Part("gate", size, 48), Part("up", size, 48)], 0.02, gates=True)
    down, narrow = layer([Part("down", 48, size)], 0.5)
    norm = RMSNorm("", DEVICE, DTYPE, size, 1e-5)
    norm.place([torch.rand(size).to(DEVICE, DTYPE)])
    value, added = (torch.randn(rows, size).to(DTYPE) for _ in range(2))
    stream = Stream(value.to(DEVICE))
    if pending == "an output":
        stream.add_later(added.to(DEVICE, copy=True))
    elif pending == "parts":
        stream.add_parts_later(torch.stack([added / 2, added / 2]).to(DEVICE))
    inner = up.gated_after_norm(stream, norm, down)
    assert isinstance(inner, Rounded)
    assert inner.scales is None
    total = value.double() + (0 if pending == "nothing" else added.double())
    normed = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.cpu().double()
    gate, other = (rounded(normed, 0.02) @ wide.T).chunk(2, 1)
    taken = rounded(F.silu(gate) * other, 0.5)
    limit = 0.05 if GPU else 0.02  # sums of 16 bits are rounded the other way more often
    assert off(inner.codes.float() * 0.5, taken) < limit
    down.into(stream, inner)
    assert off(stream.total().float(), total + taken @ narrow.T) < limit
    for one, scale in ((up, 0.02), (down, 0.5)):
        assert one.rounds_by(packed.FEW_LEFT) is None
        factor = one.rounds_by(rows)
        assert factor is not None
        torch.testing.assert_close(factor.cpu(), torch.tensor([1 / scale]))
        one.delta = Doubled()  # which needs them unrounded
        assert one.rounds_by(rows) is None


def check_attention(case: ragged.Case, kind: torch.dtype | None = None, *, shared: bool = False) -> None:
    """The bits are those of the unrounded results, rounded; and these are right."""
    spec, backend = case.spec, TritonAttention(case.dtype, case.spec)
    q = case.q(len(case.label))
    plain = ragged.filled_cache(case, backend, DEVICE)
    step, _, _ = ragged.prepared(case, backend, q, plain.clone(), DEVICE)
    scales = None
    if kind is not None:
        scales = torch.full((2, spec.num_kv_heads), 0.05, device=DEVICE)
        plain = (plain.float() / 0.05).to(kind)
    if shared:
        step.shared = groups_of(case)
        step.attn = backend.prepare(step, case.block_size)
    parts = [q, *(torch.cat([getattr(s, name)[s.length - s.queries :] for s in case.sequences]) for name in "kv")]
    qkv = torch.cat(parts, dim=1).to(DEVICE)
    half = spec.head_dim // 2
    still = torch.cat([torch.ones(LONGEST, half), torch.zeros(LONGEST, half)], dim=1).to(DEVICE)
    sinks = None if case.sinks is None else case.sinks.to(DEVICE)

    def attend(rounded_by: Tensor | None) -> Tensor:
        with mock.patch.object(fused_decode, "serves", return_value=False):  # the kernel of few rows does not round
            return backend.rotate_and_attend(
                qkv.clone(), None, still, plain.clone(), scales, step, spec, sinks, rounded_by=rounded_by
            )

    wide, inverse = attend(None), inverse_of(0.004)  # up to 1.8: some are beyond
    assert wide.dtype == case.dtype
    made = attend(inverse)
    assert made.dtype == E4M3
    assert made.shape == wide.shape
    assert torch.equal(made.view(torch.uint8).cpu(), nearest(wide, 0.004)), case.label
    again = floats.round_rows(wide.flatten(1), inverse=inverse)
    assert torch.equal(made.view(torch.uint8).flatten(1).cpu(), bits(again)), case.label
    if kind is None:
        expected = case.expected(q).clamp(-448 * 0.004, 448 * 0.004)
        wrong = (made.cpu().double() * 0.004 - expected).abs()
        limit = expected.abs() / 16 + 0.004 * 2**-9 + 2 * ragged.TOLERANCE[case.dtype]
        assert bool((wrong <= limit).all()), f"off by {wrong.max()} with {case.label}"


@pytest.mark.parametrize(
    "rows", [FEW, pytest.param(MANY, marks=[pytest.mark.slow] * (not GPU)), DRAFTS], ids=["few", "many", "drafts"]
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), HALF], ids=str)
def test_attention_rounds(rows: dict[str, Any], dtype: torch.dtype) -> None:
    """Decodes, prompts with and without contexts, and drafts."""
    options = {"window": 37, "sinks": True} if dtype == torch.float32 else {}
    check_attention(ragged.make_case(fresh_seed(), dtype, heads=(2, 2), head_dim=96, block_size=16, **rows, **options))


@pytest.mark.parametrize("rows", [FEW, pytest.param(MANY, marks=[pytest.mark.slow] * (not GPU))], ids=["few", "many"])
@pytest.mark.parametrize(
    "kind", [torch.float8_e4m3fn, pytest.param(torch.float8_e5m2, marks=[pytest.mark.slow] * (not GPU))], ids=str
)
def test_attention_over_an_fp8_cache_rounds(rows: dict[str, Any], kind: torch.dtype) -> None:
    check_attention(ragged.make_case(fresh_seed(), HALF, heads=(2, 2), head_dim=64, block_size=16, **rows), kind)


@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [FEW, DRAFTS], ids=["few", "drafts"])
def test_a_context_in_parts_is_rounded_when_they_are_merged(
    rows: dict[str, Any], kind: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.nn.attention.triton_few.num_splits", lambda *_: 2)
    check_attention(ragged.make_case(fresh_seed(), HALF, heads=(2, 2), head_dim=64, block_size=16, **rows), kind)


@pytest.mark.parametrize("parts", [(1, 1), (2, 4), (1, 2)], ids=str)
def test_what_contexts_have_in_common_is_rounded(parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(fresh_seed())
    monkeypatch.setattr("octavo.nn.attention.triton_few.num_splits", lambda *_: parts[0])
    monkeypatch.setattr("octavo.nn.attention.triton_few._common_splits", lambda *_: parts[1])
    rows = [(LONGEST, 1), (LONGEST, 1), *((rng.randint(1, LONGEST), 1) for _ in range(4))]
    case = ragged.make_case(rng.randrange(2**31), HALF, heads=(1, 2), head_dim=64, block_size=16, rows=rows)
    for place, taker in enumerate(case.sequences[1:], 1):
        if place == 1 or rng.random() < 0.8:
            ragged.share(taker, case.sequences[rng.randrange(place)], 1.0, case.block_size)
    check_attention(case, shared=True)


def test_weights_that_replace_others_bring_their_scale() -> None:
    """At the addresses that recorded steps read."""
    mine, _ = layer([Part("down", 48, 64)], 0.02)
    its, matrix = layer([Part("down", 48, 64)], 0.5)
    held = mine.rounds_by(100)
    replace_weights(mine, its, in_place=True)
    assert held is not None
    assert held.tolist() == [2.0]
    x = torch.randn(100, 48).to(DTYPE)
    assert off(mine(x.to(DEVICE)), rounded(x, 0.5) @ matrix.T) < TOLERANCE
