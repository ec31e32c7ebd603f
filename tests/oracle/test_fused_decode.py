"""Decoding in one launch against float64: on a Hopper GPU, else compiled for the CPU, with one block for a cluster."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import ragged
import torch
from cuda_on_cpu import EmulatedKernel

pytest.importorskip("triton")

from octavo.nn.attention import fused_decode
from octavo.nn.attention.triton import TritonAttention
from octavo.nn.attention.triton_few import Few
from octavo.nn.ops.rope import apply_rope

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if HOPPER else "cpu")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs a Hopper GPU, or none"),
    pytest.mark.skipif(not HOPPER and shutil.which("g++") is None, reason="needs a compiler"),
]
LONGEST = 20_000
LENGTHS = [1, 2, 15, 16, 17, 100, 257, 511, 512, 513, 700, 1500, *([5000, LONGEST] if HOPPER else [])]
OPTIONS: list[dict[str, object]] = [
    {"heads": (2, 4), "head_dim": 64},
    {"heads": (1, 3), "head_dim": 96, "window": 37, "soft_cap": 20.0, "sinks": True},
    {"heads": (1, 8), "head_dim": 128, "biased": True},
    {"heads": (2, 1), "head_dim": 32, "window": 16, "chunked": True, "sinks": True},
    {"heads": (2, 2), "head_dim": 256, "window": 1},
]
CASES = [
    (options, dtype, normed)
    for options in OPTIONS
    for dtype in (torch.float16, torch.bfloat16)
    for normed in (False, True)
]
COMPILED = [
    (OPTIONS[0], torch.float16, True),
    pytest.param(OPTIONS[1], torch.bfloat16, False, marks=pytest.mark.slow),
]
"""On a CPU, where compiling takes as long as all else."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not HOPPER:
        monkeypatch.setattr(fused_decode, "_usable", lambda device: True)
        for divisions in ("_LARGE", "_SMALL"):
            monkeypatch.setattr(fused_decode, divisions, {32: fused_decode.Division(1, 32, 2)})
        monkeypatch.setattr(EmulatedKernel, "folder", tmp_path, raising=False)
        monkeypatch.setattr(EmulatedKernel, "late", (False, True))
        monkeypatch.setattr(
            fused_decode, "_kernel", lambda form: EmulatedKernel("fused_decode", *fused_decode.source_of(form))
        )


@pytest.mark.parametrize("trial", range(2 if HOPPER else 1))
@pytest.mark.parametrize(("options", "dtype", "normed"), CASES if HOPPER else COMPILED, ids=str)
def test_decoding(options, dtype, normed, trial):
    """A row of padding is the last one."""
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    rows = [(length, 1) for length in (*rng.sample(LENGTHS[:-1], 2), LENGTHS[-1])]
    rng.shuffle(rows)
    case = ragged.make_case(rng.randrange(2**31), dtype, block_size=rng.choice([8, 16, 32]), rows=rows, **options)
    Decoding(case, TritonAttention(dtype, case.spec), normed).check()


@pytest.mark.parametrize(
    "division",
    [*fused_decode._LARGE.values(), *fused_decode._SMALL.values(), fused_decode._NARROW]
    if HOPPER
    else [fused_decode.Division(1, 8, 1)],
    ids=str,
)
def test_each_division(division: fused_decode.Division, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "_division_of", lambda *_: division)
    seed = int.from_bytes(os.urandom(4), "little")
    rows = [(length, 1) for length in random.Random(seed).sample(LENGTHS, 5)]
    options = {"heads": (2, 4), "head_dim": 128} if HOPPER else OPTIONS[0]
    case = ragged.make_case(seed, torch.bfloat16, block_size=16, rows=rows, **options)
    Decoding(case, TritonAttention(torch.bfloat16, case.spec), False).check()


class Decoding:
    """Random queries, keys and values as they are projected; those in `case` are what must come of them."""

    def __init__(self, case: ragged.Case, backend: TritonAttention, normed: bool) -> None:
        self.case, self.backend = case, backend
        spec, count = case.spec, len(case.sequences)
        generator = torch.Generator().manual_seed(count)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv = torch.randn(count, heads, spec.head_dim, generator=generator).to(case.dtype)
        weights = torch.randn(2, spec.head_dim, generator=generator).to(case.dtype)
        self.norms = (weights[0].to(DEVICE), weights[1].to(DEVICE), 1e-5) if normed else None
        angles = torch.randn(LONGEST, spec.head_dim // 2, generator=generator)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        q, k, v = self.qkv.double().split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if normed:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
                for x, weight in zip((q, k), weights, strict=True)
            )
        positions = torch.tensor([s.length - 1 for s in case.sequences])
        self.q, k = apply_rope(q.clone(), k.clone(), self.cos_sin.double(), positions)
        for s, key, value in zip(case.sequences, k, v, strict=True):
            s.k[-1], s.v[-1] = key.to(case.dtype), value.to(case.dtype)

    def check(self) -> None:
        case, spec = self.case, self.case.spec
        before = ragged.filled_cache(case, self.backend, DEVICE)
        step, _, _ = ragged.prepared(case, self.backend, case.q(1), before.clone(), DEVICE)
        step.query_start = torch.cat([step.query_start, step.query_start[-1:] + 1])
        step.seq_lens = torch.cat([step.seq_lens, step.seq_lens.new_zeros(1)])
        step.block_tables = torch.cat([step.block_tables, step.block_tables[:1]])
        step.positions, step.slot_mapping = (
            torch.cat([x, x.new_full((1,), pad)]) for x, pad in ((step.positions, 0), (step.slot_mapping, -1))
        )
        step.attn = self.backend.prepare(step, case.block_size)
        qkv = torch.cat([self.qkv, self.qkv[:1]]).to(DEVICE)
        sinks = None if case.sinks is None else case.sinks.to(DEVICE)
        cache = before.clone()
        assert fused_decode.serves(step.attn.few, step, qkv, self.norms, cache, spec)
        got = self.backend.rotate_and_attend(qkv, self.norms, self.cos_sin.to(DEVICE), cache, None, step, spec, sinks)
        got = got.cpu().double()
        expected = case.expected(self.q.to(case.dtype))
        limit = ragged.TOLERANCE[case.dtype]
        wrong = (got[:-1] - expected).abs() / (1 + expected.abs())
        assert bool((wrong <= limit).all()), f"off by {wrong.nan_to_num(torch.inf).max()} with {case.label}"
        assert not got[-1].any()
        self.check_cells(before.cpu(), cache.cpu(), limit)

    def check_cells(self, before: torch.Tensor, after: torch.Tensor, limit: float) -> None:
        """Each row's key and value are stored, and nothing else."""
        size = self.case.block_size
        for s in self.case.sequences:
            block, offset = s.blocks[(s.length - 1) // size], (s.length - 1) % size
            key, value = after[block, :, :, offset].clone()
            torch.testing.assert_close(key, s.k[-1], atol=limit, rtol=limit)
            assert torch.equal(value, s.v[-1])
            after[block, :, :, offset] = before[block, :, :, offset]
        assert torch.equal(after.nan_to_num(-7.0), before.nan_to_num(-7.0))


def test_which_rows_are_served():
    case = ragged.make_case(1, torch.float16, heads=(2, 2), head_dim=64, block_size=16, rows=[(5, 1)])
    cache = ragged.filled_cache(case, TritonAttention(case.dtype, case.spec), DEVICE)

    def serves(
        few: Few,
        dtype: torch.dtype = torch.float16,
        kind: torch.dtype = torch.float16,
        weights: torch.dtype = torch.float16,
        longest: int = fused_decode._MOST_TOKENS,
        unseen: torch.Tensor | None = None,
    ) -> bool:
        norm = torch.ones(64, dtype=weights, device=DEVICE)
        qkv = torch.empty(1, 8, 64, dtype=dtype, device=DEVICE)
        step = SimpleNamespace(max_seq_len=longest, unseen=unseen)
        return fused_decode.serves(few, step, qkv, (norm, norm, 1e-5), cache.to(kind), case.spec)

    most = max(fused_decode._divisions(64)) // 2
    assert serves(Few(None, most, 1))
    assert not serves(Few(None, most + 1, 1)), "more rows than one launch supports"
    longer = fused_decode._MOST_TOKENS + 1
    few = min(most, fused_decode._ANY_LENGTH // 2)
    assert serves(Few(None, few, 1), longest=longer)
    assert most == few or not serves(Few(None, few + 1, 1), longest=longer)
    assert not serves(Few(None, 1, 8))
    assert not serves(Few(None, 1, 1), unseen=torch.ones(1, dtype=torch.int32, device=DEVICE))
    assert not serves(Few(torch.zeros(1, dtype=torch.int32, device=DEVICE), 1, 1))
    assert not serves(Few(None, 1, 1), kind=torch.float8_e5m2)
    assert not serves(Few(None, 1, 1), torch.float32, torch.float32, torch.float32)
    assert not serves(Few(None, 1, 1), weights=torch.float32), "Gemma's"
