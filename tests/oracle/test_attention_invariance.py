"""What a backend promises beyond the right numbers: nothing leaks, nothing is copied, nobody minds the neighbours."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import ragged
import torch
from torch.profiler import ProfilerActivity, profile

from octavo.native.build import NativeBuildError
from octavo.native.program import Pool
from octavo.nn.attention import select
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.cpu import TorchAttention
from octavo.nn.attention.native import NativeAttention

INT8 = pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])


def native(threads: int = 2, *, int8: bool = False) -> NativeAttention:
    try:
        return NativeAttention(Pool(threads), int8=int8)
    except NativeBuildError as error:
        pytest.skip(f"no native kernel on this machine: {error}")


def shape(rng: random.Random) -> dict[str, Any]:
    """Keys for one head, for some, or for more than AMX takes together; channels that are whole tiles of it, or not."""
    heads = rng.choice([(3, 3), (2, 4), (2, 1), (1, 5), (1, 40)])
    return {"heads": heads, "head_dim": rng.choice([32, 64, 80, 96, 128])}


def one(case: ragged.Case, row: int) -> ragged.Case:
    return ragged.Case(case.spec, case.dtype, case.block_size, case.num_blocks, [case.sequences[row]], case.label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trial", range(4))
@INT8
def test_native_rows_are_the_same_alone_and_in_a_batch_bit_for_bit(dtype, trial, int8):
    backend = native(int8=int8)
    rng = random.Random(os.urandom(8))
    rows = [(n, rng.choice([1, 1, rng.randint(1, n)])) for n in (rng.randint(1, 1600) for _ in range(6))]
    options = shape(rng) | {"biased": trial == 3}
    case = ragged.make_case(rng.randrange(2**32), dtype, rows=rows, block_size=rng.choice([16, 32]), **options)
    q = case.q(1)
    together = ragged.run(case, backend, q)
    start = 0
    for row, sequence in enumerate(case.sequences):
        mine = slice(start, start + sequence.queries)
        alone = ragged.run(one(case, row), native(threads=1 + row % 3, int8=int8), q[mine])
        assert torch.equal(alone, together[mine]), case.label
        start = mine.stop


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
@INT8
def test_native_chunks_give_the_whole_prompts_result_bit_for_bit(dtype, window, int8):
    backend = native(int8=int8)
    rng = random.Random(os.urandom(8))
    length = rng.randint(600, 1300)
    rows = [(length, length)]
    whole = ragged.make_case(rng.randrange(2**32), dtype, rows=rows, block_size=16, window=window, **shape(rng))
    q = whole.q(1)
    expected = ragged.run(whole, backend, q)
    sequence, cache, done = whole.sequences[0], ragged.filled_cache(whole, backend), 0
    while done < length:
        count = min(rng.choice([1, 2, rng.randint(1, 500)]), length - done)
        part = ragged.Sequence(sequence.k[: done + count], sequence.v[: done + count], sequence.blocks, count)
        chunk = ragged.Case(whole.spec, dtype, whole.block_size, whole.num_blocks, [part], whole.label)
        got = ragged.run(chunk, backend, q[done : done + count], cache)
        assert torch.equal(got, expected[done : done + count]), f"{whole.label} at {done} + {count}"
        done += count


@pytest.mark.parametrize("window", [None, 50])
def test_a_poisoned_neighbour_stays_alone(window):
    """One sequence's NaN, in its queries and in its own cache cells, reaches no other row."""
    for backend in (TorchAttention(), native(), TorchAttention(int8=True), native(int8=True)):
        rng = random.Random(os.urandom(8))
        rows = [(rng.randint(2, 300), 1), (rng.randint(40, 300), 30), (rng.randint(2, 300), 1)]
        case = ragged.make_case(rng.randrange(2**32), torch.float32, rows=rows, block_size=16, window=window)
        private = [set(s.blocks) for s in case.sequences]
        if private[1] & (private[0] | private[2]):
            shared = private[1] & (private[0] | private[2])
            case.sequences[1].blocks[:] = [
                b if b not in shared else case.num_blocks + i for i, b in enumerate(case.sequences[1].blocks)
            ]
            case.num_blocks += len(case.sequences[1].blocks)
        case.sequences[1].k[:] = torch.nan
        q = case.q(1)
        got, expected = ragged.run(case, backend, q), case.expected(q, int8=backend.int8)
        limit = ragged.tolerance(torch.float32, backend)
        for mine in (slice(0, 1), slice(31, 32)):
            torch.testing.assert_close(got[mine].double(), expected[mine], atol=limit, rtol=limit, msg=case.label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@INT8
def test_blocks_that_left_the_window_may_hold_anything(dtype, int8):
    """Another sequence's data, or a recurrent state, whose bits are those of a NaN."""
    backend, window, block_size = native(int8=int8), 40, 16
    rng = random.Random(os.urandom(8))
    rows = [(length, rng.choice([1, 1, 30])) for length in (rng.randint(120, 900) for _ in range(4))]
    case = ragged.make_case(
        rng.randrange(2**32), dtype, rows=rows, block_size=block_size, window=window, heads=(4, 2), head_dim=32
    )
    q, cache = case.q(1), ragged.filled_cache(case, backend)
    expected = ragged.run(case, backend, q, cache.clone())
    read = {
        block
        for one in case.sequences
        for block in one.blocks[max(0, one.length - one.queries + 1 - window) // block_size :]
    }
    left = [block for one in case.sequences for block in one.blocks if block not in read]
    cache[left] = -1 if int8 else torch.nan  # all bits set are a NaN, too
    assert torch.equal(ragged.run(case, backend, q, cache), expected), case.label


@pytest.mark.parametrize("scattered", [False, True], ids=["in order", "scattered"])
def test_a_decode_step_allocates_no_copy_of_the_context(scattered):
    """Memory taken during a step stays far below the context's, however its blocks lie."""
    length, rows, block_size = 2048, 4, 32
    spec = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=64, scale=0.125)
    count = length // block_size
    tables = torch.arange(rows * count, dtype=torch.int32)
    tables = (tables.view(count, rows).T if scattered else tables.view(rows, count)).contiguous()
    for backend in (TorchAttention(), native()):
        cache = torch.randn(backend.cache_shape(spec, rows * count, block_size)).bfloat16()
        step = ragged._step([(length - 3, 1, table.tolist()) for table in tables], [0] * rows, torch.device("cpu"))
        step.attn = backend.prepare(step, block_size)
        q = torch.randn(rows, spec.num_heads, spec.head_dim).bfloat16()
        backend.attend(q, cache, step, spec)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
            backend.attend(q, cache, step, spec)
        taken = sum(max(event.self_cpu_memory_usage, 0) for event in trace.events())
        assert taken < cache.nbytes / 2, backend.name


def test_the_fused_kernel_is_in_use():
    """Without it the torch backend is right but slow, which no other test would notice."""
    from octavo.nn.attention import cpu

    assert cpu._flash_works()


def test_without_the_fused_kernel_the_torch_backend_is_right(monkeypatch):
    from octavo.nn.attention import cpu

    monkeypatch.setattr(cpu, "_flash_works", lambda: False)
    for dtype in (torch.float32, torch.bfloat16):
        case = ragged.make_case(int.from_bytes(os.urandom(4), "little"), dtype)
        q = case.q(1)
        got, expected = ragged.run(case, TorchAttention(), q).double(), case.expected(q)
        limit = ragged.TOLERANCE[dtype]
        torch.testing.assert_close(got, expected, atol=limit, rtol=limit, msg=case.label)


def test_half_precision_is_served_by_torch():
    case = ragged.make_case(int.from_bytes(os.urandom(4), "little"), torch.float16)
    backend = select.select(None, BackendRequest(torch.device("cpu"), torch.float16, case.spec))
    q = case.q(1)
    limit = ragged.TOLERANCE[torch.float16]
    torch.testing.assert_close(
        ragged.run(case, backend, q).double(), case.expected(q), atol=limit, rtol=limit, msg=case.label
    )
