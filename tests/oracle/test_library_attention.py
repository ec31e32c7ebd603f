"""Attention through libraries against float64, on a GPU; how rows are divided, with a library of the test's own."""

from __future__ import annotations

import os
import random
import sys
from typing import Any
from unittest import mock

import pytest
import ragged
import torch

pytest.importorskip("triton")

from octavo.core.errors import ConfigError
from octavo.nn.attention import select
from octavo.nn.attention.base import AttentionBackend, AttentionSpec, BackendRequest
from octavo.nn.attention.libraries.attention import LibraryAttention
from octavo.nn.attention.libraries.flash_attn import FlashAttention3
from octavo.nn.attention.libraries.flashinfer import FlashInfer
from octavo.nn.attention.reference import attend_dense
from octavo.nn.attention.triton import TritonAttention

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
LIBRARIES = ["flash_attn", "flashinfer"]
LONGEST = 20_000
FEW = {"rows": [(1, 1), (2, 1), (33, 1), (LONGEST, 1)]}
MANY = {"rows": [(1, 1), (LONGEST, 40), (33, 33), (5, 2), (40, 1), (130, 130), (70, 9), (12, 1)]}
NEW = {"rows": [(33, 33), (9, 9), (4097, 4097), (130, 130)]}
ONE = {"rows": [(2048, 2048)]}
CONTINUED = {"rows": [(LONGEST, 2000), (300, 9), (513, 512)]}
MIXED = {"rows": [(9, 1), (700, 1), (600, 600), (20, 20)]}
USUAL = {"heads": (2, 4), "head_dim": 128, "block_size": 16}
BATCHES = {"few": FEW, "many": MANY, "new": NEW, "one": ONE, "continued": CONTINUED, "mixed": MIXED}


class Plain:
    """Attends row by row, as slowly as can be; notes what it was asked for."""

    name = "plain"

    def __init__(self):
        self.asked = []

    def attend(self, q, cache, prompts, spec):
        self.asked.append(prompts.counts.tolist())
        assert prompts.query_start.tolist() == [0, *prompts.counts.cumsum().tolist()]
        assert prompts.seq_lens.tolist() == prompts.lengths.tolist()
        rows = []
        for part, length, table in zip(
            q.split(prompts.counts.tolist()), prompts.lengths, prompts.block_tables, strict=True
        ):
            blocks = cache[table[: -(-length // cache.shape[3])].long()]
            k, v = (blocks[:, i].transpose(1, 2).flatten(0, 1)[:length] for i in range(2))
            rows.append(attend_dense(part, k, v, spec))
        return torch.cat(rows).to(q.dtype)


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def made(name: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[AttentionBackend, ragged.Case]:
    """The library behind its backend, and a case for `ragged.make_case`'s options; skips before that takes its time."""
    (kv_heads, group), dim = options["heads"], options["head_dim"]
    windowed = (options.get("window"), options.get("soft_cap"))
    spec = AttentionSpec(kv_heads * group, kv_heads, dim, dim**-0.5, *windowed)
    request = BackendRequest(DEVICE, dtype, spec, options["block_size"])
    factory = next(factory for factory in select.BACKENDS if factory.name == name)
    if (reason := factory.supports(request)) is not None:
        pytest.skip(f"{name} {reason}")
    return factory.make(request), ragged.make_case(fresh_seed(), dtype, **options)


def compare(got: torch.Tensor, case: ragged.Case, q: torch.Tensor) -> None:
    assert got.dtype == q.dtype
    expected = case.expected(q)
    wrong = (got.cpu().double() - expected).abs() / (1 + expected.abs())
    assert bool((wrong <= ragged.TOLERANCE[case.dtype]).all()), (
        f"off by {wrong.nan_to_num(torch.inf).max()} {case.label}"
    )


def check(backend: AttentionBackend, case: ragged.Case) -> None:
    """Once from the cache, as a layer does that rotates for itself, and once from the projection."""
    q = case.q(len(case.label))
    compare(ragged.run(case, backend, q, device=DEVICE), case, q)
    step, cache, _ = ragged.prepared(case, backend, q, device=DEVICE)
    parts = [q, *(torch.cat([getattr(s, name)[s.length - s.queries :] for s in case.sequences]) for name in "kv")]
    half, longest = case.spec.head_dim // 2, max(s.length for s in case.sequences)
    still = torch.cat([torch.ones(longest, half), torch.zeros(longest, half)], dim=1).to(DEVICE)
    qkv = torch.cat(parts, dim=1).to(DEVICE)
    compare(backend.rotate_and_attend(qkv, None, still, cache, None, step, case.spec), case, q)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_batches(name, dtype, batch):
    check(*made(name, dtype, **USUAL, **BATCHES[batch]))


@pytest.mark.parametrize("batch", ["many", "new"])
@pytest.mark.parametrize("heads", [(1, 3), (2, 1), (1, 8)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("name", LIBRARIES)
def test_shapes(name, head_dim, heads, batch):
    size = random.Random(head_dim).choice([8, 16, 32, 64])
    check(*made(name, heads=heads, head_dim=head_dim, block_size=size, **BATCHES[batch]))


@pytest.mark.parametrize("batch", ["many", "new"])
@pytest.mark.parametrize("options", [{"window": 1}, {"window": 37}, {"window": 130}, {"soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("name", LIBRARIES)
def test_window_and_soft_cap(name, options, batch):
    check(*made(name, **USUAL, **options, **BATCHES[batch]))


@pytest.mark.parametrize("name", LIBRARIES)
def test_steps_in_turn(name):
    """One backend serves steps that differ in everything but the layer."""
    rng = random.Random(fresh_seed())
    backend, _ = made(name, **USUAL, **ONE)
    for _ in range(8):
        lengths = [rng.randint(1, 3000) for _ in range(rng.randint(1, 9))]
        rows = [(n, rng.choice([1, rng.randint(1, n), n])) for n in lengths]
        check(backend, ragged.make_case(rng.randrange(2**31), torch.bfloat16, rows=rows, **USUAL))


SMALL = {"heads": (1, 2), "head_dim": 32, "block_size": 16}


@pytest.mark.parametrize(
    ("rows", "counts"),
    [
        ([(9, 1), (30, 30), (12, 12)], [30, 12]),
        ([(20, 20), (9, 1), (12, 12), (5, 1), (6, 1)], [20, 1, 12]),
        ([(40, 20), (12, 12)], [20, 12]),
    ],
)
def test_what_a_library_is_asked_for(rows, counts):
    """Rows from the first to the last with many queries."""
    case = ragged.make_case(fresh_seed(), torch.float32, rows=rows, **SMALL)
    library = Plain()
    check(LibraryAttention(library, TritonAttention(case.dtype, case.spec)), case)
    assert library.asked == [counts, counts]


class StandIns:
    """What the libraries promise of the functions that are called, in plain torch."""

    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, **options
    ):
        assert causal
        assert options["num_splits"] == 1
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        left, right = options["window_size"]
        assert right == (-1 if left == -1 else 0)
        window = None if left == -1 else left + 1
        spec = AttentionSpec(
            q.shape[1], k_cache.shape[2], q.shape[2], softmax_scale, window, options["softcap"] or None
        )
        rows = zip(q.split(cu_seqlens_q.diff().tolist()), cache_seqlens.tolist(), page_table.long(), strict=True)
        outs = []
        for part, length, table in rows:
            keys, values = (x[table].flatten(0, 1)[:length] for x in (k_cache, v_cache))
            outs.append(attend_dense(part, keys, values, spec))
        return torch.cat(outs).to(q.dtype)

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, workspace, layout):
            assert layout == "HND"

        def plan(self, qo, kv, blocks, last, heads, kv_heads, dim, page, **options):
            assert options["causal"]
            left = options["window_left"]
            how = (options["sm_scale"], None if left == -1 else left + 1, options["logits_soft_cap"])
            self.spec = AttentionSpec(heads, kv_heads, dim, *how)
            counts, pages = qo.diff().tolist(), kv.diff()
            lengths = ((pages - 1) * page + last).tolist()
            assert all(0 < end <= page for end in last.tolist())
            self.rows = list(zip(counts, lengths, blocks.long().split(pages.tolist()), strict=True))

        def run(self, q, cache, enable_pdl):
            assert not enable_pdl
            parts = q.split([count for count, _, _ in self.rows])
            outs = []
            for part, (_, length, blocks) in zip(parts, self.rows, strict=True):
                keys, values = (cache[blocks][:, i].transpose(1, 2).flatten(0, 1)[:length] for i in range(2))
                outs.append(attend_dense(part, keys, values, self.spec))
            return torch.cat(outs).to(q.dtype)


@pytest.mark.parametrize("options", [{"window": 7}, {"soft_cap": 5.0}], ids=str)
@pytest.mark.parametrize("library", ["flash_attn", "flashinfer"])
def test_what_libraries_are_told(monkeypatch, library, options):
    """By stand-ins, so that it is checked where there is neither."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", StandIns)
    monkeypatch.setitem(sys.modules, "flashinfer", StandIns)
    monkeypatch.setattr(torch.cuda, "Event", mock.MagicMock)
    make = {"flash_attn": FlashAttention3, "flashinfer": lambda: FlashInfer(DEVICE)}[library]
    rows = [(9, 1), (30, 30), (48, 20), (12, 12), (5, 1)]
    case = ragged.make_case(fresh_seed(), torch.float32, rows=rows, **SMALL, **options)
    check(LibraryAttention(make(), TritonAttention(case.dtype, case.spec)), case)


def test_what_the_host_knows_is_not_asked_of_the_device():
    case = ragged.make_case(1, torch.float32, rows=[(9, 1), (40, 20), (12, 12)], **SMALL)
    backend = LibraryAttention(Plain(), TritonAttention(case.dtype, case.spec))
    step, _, _ = ragged.prepared(case, backend, case.q(1), device=DEVICE)
    step.query_lens, step.past_lens = [1, 20, 12], [8, 20, 0]
    step.seq_lens = step.seq_lens.to("meta")
    prompts = backend.prepare(step, 16).prompts
    assert (prompts.counts.tolist(), prompts.lengths.tolist()) == ([20, 12], [40, 12])
    assert prompts.tokens == slice(1, 33)


def test_table_rows_are_followed():
    case = ragged.make_case(2, torch.float32, rows=[(40, 20), (30, 12)], **SMALL)
    backend = LibraryAttention(Plain(), TritonAttention(case.dtype, case.spec))
    q = case.q(1)
    step, cache, there = ragged.prepared(case, backend, q, device=DEVICE)
    step.block_tables = torch.cat([torch.zeros_like(step.block_tables), step.block_tables.flip(0)])
    step.table_rows = torch.tensor([3, 2], dtype=torch.int32, device=DEVICE)
    step.attn = backend.prepare(step, 16)
    compare(backend.attend(there, cache, step, case.spec), case, q)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FlashInfer"])
def test_a_forced_library_says_what_stops_it(name):
    request = BackendRequest(torch.device("cpu"), torch.bfloat16, AttentionSpec(4, 2, 64, 0.125))
    with pytest.raises(ConfigError, match=f"'{name.lower()}' can't be used here: it runs on cuda, not on cpu"):
        select.select(name, request)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"dtype": torch.float32}, "computes in bfloat16 or float16, not in float32: --dtype bfloat16"),
        ({"kv_dtype": torch.float8_e4m3fn}, "leave --kv-cache-dtype out"),
        ({"spec": AttentionSpec(4, 2, 100, 0.1)}, "a multiple of 8, not 100"),
    ],
    ids=str,
)
def test_reasons(monkeypatch, request_, why):
    from octavo.nn.attention.libraries.request import common_reason

    options = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "spec": AttentionSpec(4, 2, 64, 0.125)}
    assert common_reason(BackendRequest(**options), "json", "JSON") is None
    assert common_reason(BackendRequest(**options), "no_such_module", "It") == (
        "needs It (the module no_such_module), which is not installed"
    )
    reason = common_reason(BackendRequest(**(options | request_)), "json", "JSON")
    assert reason is not None
    assert why in reason


def test_names_of_others():
    request = BackendRequest(torch.device("cpu"), torch.float32, AttentionSpec(4, 2, 64, 0.125))
    assert select.select("TORCH_SDPA", request).name == "torch"
