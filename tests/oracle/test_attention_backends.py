"""Every attention backend of this machine against float64, on batches that differ with every run."""

from __future__ import annotations

import functools
import os
import random
from dataclasses import replace

import pytest
import ragged
import torch
from examples import examples
from levels import is_slow

from octavo.native.build import NativeBuildError, load_library
from octavo.native.isa import LEVELS, usable
from octavo.native.program import Pool
from octavo.nn.attention.cpu import TorchAttention
from octavo.nn.attention.native import NativeAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.step import StepInput


def native(isa, **options):
    """The kernels compiled for one instruction set, each of which is another path through them."""
    if isa not in usable():
        pytest.skip(f"this processor has no {isa.name}")
    try:
        load_library(isa.name)
    except NativeBuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    return NativeAttention(Pool(2, isa.name), **options)


BACKENDS = {
    "reference": ReferenceAttention,
    "torch": TorchAttention,
    **{f"native-{isa.name}": functools.partial(native, isa) for isa in LEVELS},
}
INT8 = {name: functools.partial(make, int8=True) for name, make in BACKENDS.items()}
_SLOW = {f"native-{isa.name}" for isa in LEVELS if is_slow(isa)}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in _SLOW else name for name in BACKENDS]
MOVING = NAMES[1:]
"""Those that serve; the reference moves no cells."""
DTYPES = [torch.float32, torch.bfloat16]


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def check(case: ragged.Case, backend) -> None:
    q = case.q(len(case.label))
    got = ragged.run(case, backend, q)
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    expected = case.expected(q, int8=backend.int8)
    wrong = (got.double() - expected).abs() / (1 + expected.abs())
    limit = ragged.tolerance(case.dtype, backend)
    assert bool((wrong <= limit).all()), f"off by {wrong.nan_to_num(torch.inf).max()} with {case.label}"


def block_size(backend) -> int:
    """The native kernels read whole panels of 16 tokens."""
    return random.choice([16, 32, 64] if backend.name == "native" else [8, 16, 32])


@pytest.fixture(params=NAMES)
def backend(request):
    return BACKENDS[request.param]()


@pytest.fixture(params=NAMES)
def int8_backend(request):
    return INT8[request.param]()


def test_the_reference_follows_table_rows():
    """As a GPU's steps have them, of which it is the judge."""
    case = ragged.make_case(fresh_seed(), torch.float32, rows=[(40, 20), (30, 12)])
    backend, q = ReferenceAttention(), case.q(1)
    step, cache, there = ragged.prepared(case, backend, q)
    expected = backend.attend(there, cache, step, case.spec)
    step.block_tables = torch.cat([torch.zeros_like(step.block_tables), step.block_tables.flip(0)])
    step.table_rows = torch.tensor([3, 2], dtype=torch.int32)
    assert torch.equal(backend.attend(there, cache, step, case.spec), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trial", range(examples(12)))
def test_random_batches(backend, dtype, trial):
    check(ragged.make_case(fresh_seed(), dtype, block_size=block_size(backend)), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 37},
        {"window": 200},
        {"soft_cap": 5.0},
        {"window": 90, "soft_cap": 20.0},
        {"biased": True},
        {"window": 90, "soft_cap": 20.0, "biased": True},
        {"window": 37, "chunked": True},
        {"sinks": True},
        {"window": 128, "sinks": True},
        {"window": 90, "chunked": True, "soft_cap": 20.0, "biased": True, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("trial", range(examples(4)))
def test_windows_soft_caps_biases_and_sinks(backend, dtype, options, trial):
    check(ragged.make_case(fresh_seed(), dtype, block_size=block_size(backend), **options), backend)


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("blocks", [8, 16, 32])
def test_shapes(backend, head_dim, blocks):
    size = 2 * blocks if backend.name == "native" else blocks
    check(ragged.make_case(fresh_seed(), torch.bfloat16, head_dim=head_dim, block_size=size), backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_decodes(backend, dtype):
    rows = [(n, 1) for n in (1, 2, 15, 16, 17, 31, 32, 33, 250, 251, 300, 511, 512, 513, 640)] * 2
    check(ragged.make_case(fresh_seed(), dtype, rows=rows, head_dim=32, block_size=block_size(backend)), backend)


@pytest.mark.parametrize(
    "options", [{}, {"window": 4096}, {"soft_cap": 30.0}, {"biased": True}, {"sinks": True}], ids=str
)
def test_long_contexts(backend, options):
    rows = [(20_000, 1), (9_001, 1), (7, 7), (5_000, 3)]
    size = block_size(backend)
    check(
        ragged.make_case(fresh_seed(), torch.float32, rows=rows, heads=(1, 3), head_dim=32, block_size=size, **options),
        backend,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("trial", range(examples(8)))
def test_int8_random_batches(int8_backend, dtype, trial):
    check(ragged.make_case(fresh_seed(), dtype, block_size=block_size(int8_backend)), int8_backend)


@pytest.mark.parametrize("options", [{"window": 37}, {"window": 90, "soft_cap": 20.0}, {"biased": True}], ids=str)
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_int8_windows_soft_caps_and_linear_biases(int8_backend, options, head_dim):
    size = block_size(int8_backend)
    check(ragged.make_case(fresh_seed(), torch.float32, block_size=size, head_dim=head_dim, **options), int8_backend)


def test_int8_long_contexts(int8_backend):
    rows = [(9_001, 1), (7, 7), (3_000, 3), (1, 1)]
    size = block_size(int8_backend)
    check(
        ragged.make_case(fresh_seed(), torch.float32, rows=rows, heads=(1, 3), head_dim=32, block_size=size),
        int8_backend,
    )


BRANCHED = [(1, 1), (9, 9), (40, 8), (600, 5), (520, 16), (700, 31), (64, 1), (300, 40)]


@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0, "sinks": True}], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drafts_that_branch(backend, dtype, options):
    size = block_size(backend)
    check(ragged.make_case(fresh_seed(), dtype, rows=BRANCHED, block_size=size, branched=True, **options), backend)


def test_int8_drafts_that_branch(int8_backend):
    size = block_size(int8_backend)
    check(
        ragged.make_case(fresh_seed(), torch.float32, rows=BRANCHED, block_size=size, branched=True),
        int8_backend,
    )


MUTUAL = [(1, 1), (9, 9), (40, 8), (600, 5), (700, 300), (300, 40), (530, 530)]
"""Also rows with few queries whose contexts are divided."""


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 37}, {"window": 90, "soft_cap": 20.0, "sinks": True}, {"window": 64, "chunked": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_that_attend_to_later_ones(backend, dtype, options):
    size = block_size(backend)
    check(ragged.make_case(fresh_seed(), dtype, rows=MUTUAL, block_size=size, mutual=True, **options), backend)


def test_int8_tokens_that_attend_to_later_ones(int8_backend):
    size = block_size(int8_backend)
    case = ragged.make_case(fresh_seed(), torch.float32, rows=MUTUAL, block_size=size, mutual=True, window=300)
    check(case, int8_backend)


def test_a_backend_that_sees_all_drafts_is_found():
    class Blind(TorchAttention):
        def attend(self, q, cache, step, spec, sinks=None):
            return super().attend(q, cache, replace(step, unseen=None), spec, sinks)

    with pytest.raises(AssertionError, match="off by"):
        check(ragged.make_case(fresh_seed(), torch.float32, rows=BRANCHED, branched=True), Blind())


@pytest.mark.parametrize("backend", MOVING, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_cells(backend, dtype):
    check_moved(backend, dtype, dtype)


@pytest.mark.parametrize("int8_backend", MOVING, indirect=True)
def test_int8_moved_cells(int8_backend):
    check_moved(int8_backend, torch.float32, torch.int8)


def check_moved(backend, dtype, stored) -> None:
    """Moved keys and values are those that would have been written there."""
    rng = random.Random(fresh_seed())
    layers, blocks, size = 3, 6, block_size(backend) or 16
    count = blocks * size
    case = ragged.make_case(rng.random(), dtype, rows=[(count, 1)], block_size=size)
    shape = (layers, *backend.cache_shape(case.spec, blocks, size))
    moved, written = torch.zeros(shape, dtype=stored), torch.zeros(shape, dtype=stored)
    sources, targets = (torch.tensor(rng.sample(range(count), 20)) for _ in range(2))
    k, v = case.sequences[0].k, case.sequences[0].v
    for layer in moved:
        _fill(backend, k, v, layer, size)
    backend.move(moved, sources, targets)
    for one in (k, v):
        one[targets] = one[sources]
    for layer in written:
        _fill(backend, k, v, layer, size)
    assert torch.equal(moved.view(torch.int8), written.view(torch.int8))


def _fill(backend, k, v, cache, size) -> None:
    """Write a token to each cell of the cache."""
    count = len(k)
    step = StepInput(
        input_ids=torch.zeros(count, dtype=torch.long),
        positions=torch.arange(count),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(count // size, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        logit_rows=torch.tensor([], dtype=torch.long),
        max_query_len=count,
        max_seq_len=count,
    )
    step.attn = backend.prepare(step, size)
    backend.write(k, v, cache, step)
