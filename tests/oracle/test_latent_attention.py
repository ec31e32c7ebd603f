"""Every backend of latent attention against float64, on batches that differ with every run; the native one also against
itself, bit for bit.

Triton's kernels run on the GPU where there is one, else small, under the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import os
import random
import shutil
from dataclasses import dataclass

import pytest
import torch
from cuda_on_cpu import EmulatedKernel
from levels import ISAS, needs_isa
from torch import Tensor

from octavo.native.program import Pool
from octavo.nn.latent.base import LatentSpec, absorbs
from octavo.nn.latent.cpu import TorchLatents
from octavo.nn.latent.native import NativeLatents
from octavo.nn.latent.reference import ReferenceLatents, attend_expanded
from octavo.nn.step import StepInput

GPU = torch.cuda.is_available()
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
# The interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if GPU else torch.float16
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SMALL = LatentSpec(num_heads=3, rank=48, rope_dim=8, nope_dim=24, value_dim=20, scale=0.17)
LITE = LatentSpec(num_heads=16, rank=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5)
WHOLE = (
    LatentSpec(num_heads=3, rank=48, rope_dim=16, nope_dim=32, value_dim=16, scale=0.17),
    LatentSpec(num_heads=5, rank=80, rope_dim=32, nope_dim=16, value_dim=48, scale=0.13),
)
"""Widths in multiples of 16, which the CPU's kernels need; not of the registers' tiles."""
ROWS = {
    "few": [(1, 1), (2, 1), (31, 1), (33, 1), (64, 1), (150, 1)],
    "many": [(1, 1), (150, 40), (33, 33), (5, 2), (40, 1), (130, 130), (70, 9)],
    "drafts": [(1, 1), (9, 4), (150, 3), (64, 2), (3, 3)],
}
# The interpreter takes a second for some ten tiles of keys.
TRITON_ROWS = (
    ROWS if GPU else {"few": [(1, 1), (33, 1)], "many": [(40, 20), (33, 33), (17, 1)], "drafts": [(33, 3), (2, 2)]}
)


@dataclass
class Case:
    """A step: rows of (length, queries) over blocks in random order, and what the layer is given."""

    spec: LatentSpec
    dtype: torch.dtype
    block_size: int
    step: StepInput
    past: StepInput
    cos_sin: Tensor
    norm: tuple[Tensor, float]
    expansion: Tensor
    num_blocks: int
    label: str

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """Projected queries and latents: strided views of one product, as in a model."""
        spec, generator = self.spec, torch.Generator().manual_seed(seed)
        both = torch.randn(tokens, spec.num_heads * spec.query_dim + spec.width, generator=generator)
        q, latents = both.to(self.dtype).split([spec.num_heads * spec.query_dim, spec.width], dim=1)
        return q.unflatten(1, (spec.num_heads, spec.query_dim)), latents


def make_case(rows: list[tuple[int, int]], spec: LatentSpec, dtype: torch.dtype, *, block_size: int = 16) -> Case:
    seed = int.from_bytes(os.urandom(3), "little")
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in rows]
    ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    if seed % 2:
        ids.sort()
    tables, taken = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32), 0
    for table, count in zip(tables, counts, strict=True):
        table[:count] = torch.tensor(ids[taken : taken + count])
        taken += count
    weight = torch.randn(spec.num_heads, spec.expanded_dim, spec.rank, generator=generator) * spec.rank**-0.5
    angles = torch.rand(max(length for length, _ in rows), spec.rope_dim // 2, generator=generator) * 6
    label = f"seed={seed} {dtype} {spec} block_size={block_size} rows={rows}"
    return Case(
        spec,
        dtype,
        block_size,
        _step([(length, count) for length, count in rows], tables, block_size),
        _step([(length - count, length - count) for length, count in rows], tables, block_size),
        torch.cat([angles.cos(), angles.sin()], dim=1),
        ((1 + 0.1 * torch.randn(spec.rank, generator=generator)).to(dtype), 1e-6),
        weight.to(dtype),
        len(ids),
        label,
    )


def _step(rows: list[tuple[int, int]], tables: Tensor, block_size: int) -> StepInput:
    positions = [torch.arange(length - count, length) for length, count in rows]
    cells = [
        table[own // block_size].long() * block_size + own % block_size
        for table, own in zip(tables, positions, strict=True)
    ]
    counts = [count for _, count in rows]
    return StepInput(
        input_ids=torch.zeros(sum(counts), dtype=torch.long),
        positions=torch.cat(positions),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor([length for length, _ in rows], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(cells),
        logit_rows=torch.tensor([], dtype=torch.long),
        max_query_len=max(counts),
        max_seq_len=max(length for length, _ in rows),
    )


def run(case: Case, backend, rows: slice | None = None) -> Tensor:
    """Fill the contexts, every other cell being NaN; then compute the step, or only some rows of it."""
    cache = torch.full(backend.cache_shape(case.spec, case.num_blocks, case.block_size), torch.nan, dtype=case.dtype)
    device = torch.device("cuda" if GPU and backend.name == "triton" else "cpu")
    cache, expansion = cache.to(device), case.expansion.to(device)
    for step, seed in ((case.past, 1), (case.step, 2)):
        if not step.num_tokens:
            continue
        step = moved(step, device)
        q, latents = (x.to(device) for x in case.inputs(step.num_tokens, seed))
        step.attn = backend.prepare(step, case.block_size)
        norm = (case.norm[0].to(device), case.norm[1])
        backend.store(q, latents, norm, case.cos_sin.to(device), cache, step, case.spec)
    if rows is not None:
        step, q, latents = _some(step, rows, q, latents)
        step.attn = backend.prepare(step, case.block_size)
    return backend.attend(q, latents, expansion, cache, step, case.spec)


def _some(step: StepInput, rows: slice, q: Tensor, latents: Tensor) -> tuple[StepInput, Tensor, Tensor]:
    """The step of consecutive rows alone."""
    starts = step.query_start[rows.start : rows.stop + 1]
    tokens = slice(int(starts[0]), int(starts[-1]))
    fields = {name: getattr(step, name) for name in StepInput.__slots__}
    fields |= {name: fields[name][tokens] for name in ("input_ids", "positions", "slot_mapping")}
    fields |= {name: fields[name][rows].contiguous() for name in ("seq_lens", "block_tables")}
    return StepInput(**(fields | {"query_start": starts - starts[0]})), q[tokens], latents[tokens]


def moved(step: StepInput, device: torch.device) -> StepInput:
    fields = {name: getattr(step, name) for name in StepInput.__slots__}
    return StepInput(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in fields.items()})


def check(case: Case, backend, expected: Tensor | None = None) -> None:
    got = run(case, backend)
    assert got.dtype == case.dtype
    expected = (run(case, ReferenceLatents()) if expected is None else expected).double()
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs())
    assert bool((wrong <= TOLERANCE[case.dtype]).all()), f"off by {wrong.nan_to_num(torch.inf).max()}: {case.label}"


def triton_backend(case: Case):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from octavo.nn.latent.triton import TritonLatents

    return TritonLatents(case.dtype, case.spec)


def test_the_reference_is_attention_over_whole_keys():
    """Written out for one query and one head: softmax of q·[k, rotated key], times values."""
    spec = LatentSpec(num_heads=1, rank=4, rope_dim=2, nope_dim=3, value_dim=5, scale=0.5)
    generator = torch.Generator().manual_seed(0)
    latents, q = torch.randn(6, 6, generator=generator).double(), torch.randn(1, 1, 5, generator=generator).double()
    expansion = torch.randn(1, 8, 4, generator=generator).double()
    keys = torch.cat([latents[:, :4] @ expansion[0, :3].T, latents[:, 4:]], dim=1)
    weights = (0.5 * keys @ q[0, 0]).softmax(0)
    expected = weights @ (latents[:, :4] @ expansion[0, 3:].T)
    torch.testing.assert_close(attend_expanded(q, latents, expansion, spec)[0, 0], expected)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch(rows, dtype):
    check(case := make_case(rows, SMALL, dtype), TorchLatents())
    assert torch.equal(run(case, TorchLatents()), run(case, TorchLatents()))


@pytest.fixture(scope="module", params=ISAS)
def pool(request) -> Pool:
    return Pool(2, needs_isa(request.param))


@pytest.mark.parametrize("spec", WHOLE, ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native(pool, spec, dtype):
    """Contexts of several tiles and parts, and tokens of prompts that attend to some of them."""
    rng = random.Random(os.urandom(8))
    drawn = [(n, rng.choice([1, n, rng.randint(1, min(n, 9))])) for n in (rng.randint(1, 1400) for _ in range(3))]
    check(make_case([*ROWS["many"], *ROWS["drafts"], *drawn], spec, dtype), NativeLatents(pool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_rows_are_the_same_alone_and_in_a_batch_bit_for_bit(dtype):
    """With any number of threads, which divide heads and contexts differently."""
    rng = random.Random(os.urandom(8))
    rows = [(n, rng.choice([1, 1, rng.randint(1, n)])) for n in (rng.randint(1, 1600) for _ in range(5))]
    case = make_case(rows, rng.choice(WHOLE), dtype, block_size=rng.choice([8, 16, 48]))
    together = run(case, NativeLatents(Pool(2)))
    for row, (first, last) in enumerate(itertools.pairwise(case.step.query_start.tolist())):
        alone = run(case, NativeLatents(Pool(1 + row % 4)), slice(row, row + 1))
        assert torch.equal(alone, together[first:last]), case.label


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_chunks_give_the_whole_prompts_result_bit_for_bit(dtype):
    rng = random.Random(os.urandom(8))
    length = rng.randint(600, 1300)
    whole = make_case([(length, length)], rng.choice(WHOLE), dtype)
    backend, spec = NativeLatents(Pool(2)), whole.spec
    shape = backend.cache_shape(spec, whole.num_blocks, whole.block_size)
    expected, cache, done = run(whole, backend), torch.full(shape, torch.nan, dtype=dtype), 0
    q, latents = whole.inputs(length, 2)
    while done < length:
        end = min(done + rng.choice([1, 2, rng.randint(1, 500)]), length)
        step = _step([(end, end - done)], whole.step.block_tables, whole.block_size)
        step.attn = backend.prepare(step, whole.block_size)
        own = q[done:end], latents[done:end]
        backend.store(*own, whole.norm, whole.cos_sin, cache, step, spec)
        got = backend.attend(*own, whole.expansion, cache, step, spec)
        assert torch.equal(got, expected[done:end]), f"{whole.label} at {done} to {end}"
        done = end


def test_torch_past_a_chunk_of_keys():
    check(make_case([(2500, 3), (1300, 1300), (1025, 1)], SMALL, torch.float32), TorchLatents())


@pytest.mark.parametrize("rows", TRITON_ROWS.values(), ids=TRITON_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_triton(rows, dtype):
    case = make_case(rows, SMALL, dtype)
    check(case, triton_backend(case))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.skipif(not GPU, reason="too slow under the interpreter")
def test_triton_with_the_shape_of_deepseek_v2_lite(rows):
    case = make_case([*rows, (20_000, 1), (9_001, 700)], LITE, HALF)
    check(case, triton_backend(case))


def test_triton_divides_long_contexts(monkeypatch):
    case = make_case([(40, 1), (2, 1), (7, 1)], SMALL, HALF)
    monkeypatch.setattr("octavo.nn.latent.triton.num_splits", lambda programs, longest, device: 2)
    check(case, triton_backend(case))


def test_triton_expands_long_contexts_piece_by_piece(monkeypatch):
    from octavo.nn.latent import triton_plan

    monkeypatch.setattr(triton_plan, "EXPANDED_TOKENS", 32)
    monkeypatch.setattr(triton_plan, "absorbs", lambda queries, length, spec: queries == 1)
    case = make_case([(50, 20), (40, 40), (5, 1)], SMALL, HALF)
    check(case, triton_backend(case))


def test_triton_follows_table_rows():
    case = make_case([(20, 3), (9, 1), (5, 2)], SMALL, torch.float32)
    backend = triton_backend(case)
    expected = run(case, backend)
    for step in (case.step, case.past):
        step.block_tables = torch.cat([torch.zeros_like(step.block_tables), step.block_tables.flip(0)])
        step.table_rows = torch.tensor([5, 4, 3], dtype=torch.int32)
    torch.testing.assert_close(run(case, backend), expected)


def recorded(case: Case):
    """The backend, with the case's step as a graph has it: tiles and rows of a buffer, whose unused entries name a row
    without queries."""
    backend, step = triton_backend(case), case.step
    device = torch.device("cuda" if GPU else "cpu")
    counts = step.query_start.diff()
    tiles, single = backend.cut(counts.numpy(), (step.seq_lens - counts).tolist(), device)
    unused, tokens = step.num_rows, step.num_tokens
    step.query_start = torch.cat([step.query_start, step.query_start[-1:]])
    step.seq_lens = torch.cat([step.seq_lens, torch.zeros(1, dtype=torch.int32)])
    step.block_tables = torch.cat([step.block_tables, torch.zeros_like(step.block_tables[:1])])
    padded = torch.full((2 * backend.most_tiles(tokens, unused, device),), unused, dtype=torch.int32)
    padded[: len(tiles)] = torch.from_numpy(tiles)
    rows = torch.full((tokens,), unused, dtype=torch.int32)
    rows[: len(single)] = torch.from_numpy(single)
    plan = backend.foreseen(padded.to(device), rows.to(device), tokens)
    backend.prepare, kept = (
        lambda step, size: plan if step.num_rows == unused + 1 else kept(step, size),
        backend.prepare,
    )
    return backend


def test_recorded_steps_are_absorbed_tile_by_tile():
    case = make_case([(20, 10), (12, 1), (5, 2)], SMALL, torch.float32)
    expected = run(case, triton_backend(case))
    torch.testing.assert_close(run(case, recorded(case)), expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("heads", [3, 8])
def test_triton_in_parts_by_length(heads, monkeypatch):
    """A plan divides one long context into several parts, and others not at all."""
    case = make_case(
        [(17, 1), (1, 1), (150 if not GPU else 9000, 1), (33, 1)], dataclasses.replace(SMALL, num_heads=heads), HALF
    )
    backend = triton_backend(case)
    from octavo.nn.latent import latent_decode, triton_parts

    monkeypatch.setattr(latent_decode, "serves", lambda *_: False)
    monkeypatch.setattr(triton_parts, "_MOST_EQUAL", 1000)
    if not GPU:
        monkeypatch.setattr(triton_parts, "_BOUNDS", triton_parts._BOUNDS._replace(least=16))
    merged, merge = [], triton_parts.merge
    monkeypatch.setattr(triton_parts, "merge", lambda plan, *args: merged.append(plan) or merge(plan, *args))
    check(case, backend)
    parts = merged[0].plan[: 4 * merged[0].slots].view(-1, 4)[:, 2]
    assert int(parts.max()) > 1


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """The CUDA kernel on a Hopper GPU, else compiled for the CPU, with one block for a cluster."""
    if GPU and not HOPPER:
        pytest.skip("needs a Hopper GPU, or none")
    if not GPU and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    latent_decode = pytest.importorskip("octavo.nn.latent.latent_decode")
    if not GPU:
        made = functools.cache(lambda form: EmulatedKernel("latent_decode", *latent_decode.source_of(form)))
        monkeypatch.setattr(EmulatedKernel, "folder", tmp_path, raising=False)
        monkeypatch.setattr(EmulatedKernel, "late", (False, True))
        monkeypatch.setattr(latent_decode, "_usable", lambda device: True)
        monkeypatch.setattr(latent_decode, "_kernel", lambda form, splits: made(form))
    return latent_decode


def divided(kernel, monkeypatch, splits: int, parts: int) -> None:
    monkeypatch.setattr(kernel, "division", lambda *_: kernel.Division(splits, parts))
    if not GPU:
        monkeypatch.setattr(kernel, "_clusters", lambda form: {1: 4})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if GPU else [torch.bfloat16], ids=str)
def test_decoding_in_cuda(kernel, monkeypatch, dtype):
    """Contexts of no whole tile, of one, of more tiles than there are places for, and of fewer tiles than blocks."""
    rng = random.Random(os.urandom(8))
    lengths = [1, 64, 65, rng.randint(193, 400)] if not GPU else [1, 64, 5000, *rng.sample(range(1, 1500), 12)]
    rng.shuffle(lengths)
    spec = LITE if GPU else LatentSpec(num_heads=5, rank=256, rope_dim=64, nope_dim=24, value_dim=20, scale=0.1)
    case = make_case([(length, 1) for length in lengths], spec, dtype, block_size=rng.choice([8, 16, 32]))
    expected = run(case, ReferenceLatents())
    for splits, parts in [(s, p) for s in (1, 2, 4, 8, 16) for p in (0, 1, 4)] if GPU else [(1, 1), (1, 3)]:
        divided(kernel, monkeypatch, splits, parts)
        monkeypatch.setattr(EmulatedKernel, "late", (parts > 1,))
        check(case, backend := triton_backend(case), expected)
    step = moved(case.step, torch.device("cuda" if GPU else "cpu"))
    few, q = backend.prepare(step, case.block_size).few, case.inputs(len(lengths), 2)[0].to(step.device)
    cache = torch.empty(backend.cache_shape(spec, 1, case.block_size), dtype=dtype, device=step.device)
    assert kernel.serves(few, q, cache, spec), "these rows are not decoded by another kernel"


def test_decoding_in_parts_by_length_in_cuda(kernel, monkeypatch):
    """A plan divides long contexts: here one into several parts, and others not at all."""
    divided(kernel, monkeypatch, 1, 0)
    lengths = [1, 300, 20, 64] if not GPU else [1, 16000, *random.Random(os.urandom(8)).sample(range(1, 900), 70)]
    random.Random(os.urandom(8)).shuffle(lengths)
    spec = LITE if GPU else LatentSpec(num_heads=5, rank=256, rope_dim=64, nope_dim=24, value_dim=20, scale=0.1)
    plans = []
    launch = kernel.triton_plan.launch
    monkeypatch.setattr(kernel.triton_plan, "launch", lambda plan, *args: plans.append(plan) or launch(plan, *args))
    case = make_case([(length, 1) for length in lengths], spec, torch.bfloat16)
    check(case, backend := triton_backend(case))
    assert len(plans) == 1
    table = plans[0][: 4 * len(lengths)].view(-1, 4).tolist()
    parts = {item: parts for item, _, parts, _ in table if item >= 0}
    assert max(parts.values()) > 1
    assert not plans[0][-len(lengths) :].any(), "the next layer counts from zero"
    assert backend.name == "triton"


@pytest.mark.parametrize("parts", [pytest.param(1, marks=[pytest.mark.slow] * (not GPU)), 2])
def test_decoding_beside_prompts_in_cuda(kernel, monkeypatch, parts):
    divided(kernel, monkeypatch, 2 if GPU else 1, parts)
    spec = LITE if GPU else LatentSpec(num_heads=16, rank=256, rope_dim=64, nope_dim=16, value_dim=16, scale=0.1)
    case = make_case([(20, 10), (70, 1), (5, 1), (19, 2)], spec, HALF)
    check(case, triton_backend(case))
    check(case, recorded(case))


def test_blocks_divide_rows_evenly(kernel):
    """Half of the multiprocessors or more have something to do."""
    form = kernel.LatentForm(torch.bfloat16, 16, 512, 64, 128, 16)
    clusters = {1: 132, 2: 66, 4: 31, 8: 14, 16: 6}
    assert [kernel.widest(rows, clusters) for rows in (1, 14, 15, 32, 67, 200)] == [16, 8, 4, 2, 1, 1]
    for rows in (*range(1, 140), 256, 1000):
        splits, parts = kernel.fastest(rows, form, clusters)
        assert rows > 66 or rows * splits * parts >= 64, rows


def test_what_is_decoded_in_cuda(kernel):
    from octavo.nn.attention.triton_few import Few

    device = torch.device("cuda" if GPU else "cpu")
    cache = torch.empty(2, 16, LITE.width, dtype=torch.bfloat16, device=device)
    q = torch.empty(3, LITE.num_heads, LITE.query_dim, dtype=torch.bfloat16, device=device)
    few = Few(None, 3, 1)
    assert kernel.serves(few, q, cache, LITE)
    assert not kernel.serves(Few(None, 3, 8), q, cache, LITE), "drafts"
    assert not kernel.serves(few, q.float(), cache.float(), LITE)
    assert not kernel.serves(few, q, cache, dataclasses.replace(LITE, num_heads=17)), (
        "more heads than the units have rows"
    )
    assert not kernel.serves(few, q, cache, dataclasses.replace(LITE, rank=448))
    assert not kernel.serves(few, q[:, :, 1:], cache, LITE), "copies are of 16 aligned bytes"


def test_the_form_follows_the_cost():
    assert all(absorbs(1, length, LITE) for length in (2, 100, 100_000))
    assert not absorbs(512, 512, LITE)
    assert absorbs(64, 20_000, LITE)
    assert not absorbs(300, 20_000, LITE)


def test_random_batches():
    rng = random.Random(os.urandom(8))
    for _ in range(6):
        lengths = [rng.randint(1, 80) for _ in range(rng.randint(1, 6))]
        rows = [(n, rng.choice([1, 1, n, rng.randint(1, n)])) for n in lengths]
        check(make_case(rows, SMALL, torch.float32, block_size=rng.choice([8, 16, 32])), TorchLatents())
