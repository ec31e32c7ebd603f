"""Attention's kernels alone on one GPU: bytes a second of decoding, operations a second of prompts, of their ceilings.

    python benchmarks/gpu_attention.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--sweep] [--output FILE]
    python benchmarks/gpu_attention.py --only prefill --libraries flash_attn flashinfer
    python benchmarks/gpu_attention.py --only verify
    python benchmarks/gpu_attention.py --only fused
    python benchmarks/gpu_attention.py --only unequal
    python benchmarks/gpu_attention.py --only windows --heads 16 --kv-heads 8 --head-dim 256

Random keys and values, block tables permuted; times are medians of a graph's replays over several caches, so that
nothing is found in the L2 cache. Decoding counts the bytes of keys and values as stored; prompts count the operations
of the causal half. `verify` computes some queries a row, as for drafts, and compares its bytes a second with those of
one query, measured right before it. `fused` decodes few rows from the projection on, in one launch and in several.
`unequal` decodes and verifies batches with one long context. `windows` decodes with a window and counts only
the bytes and operations inside it; a kernel that read more would seem slower the longer the context. --libraries times
prompts through these too.
--sweep tries launch shapes (`nn/attention/triton_shapes.py`) and prints the best of each.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_workloads import ceilings
from torch import Tensor

from octavo.nn.attention import fused_decode, prompt_tiles, triton, triton_few
from octavo.nn.attention.base import AttentionSpec, BackendRequest
from octavo.nn.attention.libraries.attention import LibraryAttention
from octavo.nn.attention.select import select
from octavo.nn.attention.triton_shapes import Shape
from octavo.nn.step import StepInput

DTYPE = torch.bfloat16
KINDS = {"bf16": DTYPE, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PAGE = 16
DECODING = ((32, 8192), (256, 512), (64, 1024), (8, 2048), (1, 1024))
VERIFYING = ((32, 8192), (256, 512), (256, 2048), (64, 1024), (16, 4096), (8, 2048), (1, 8192), (1, 1024))
FUSED = tuple((rows, length) for rows in (1, 2, 4, 8, 16, 32) for length in (20, 256, 1024, 8000))
UNEQUAL = tuple((rows, longest) for rows in (16, 32, 64, 128, 256) for longest in (300, 4000, 16000))
"""(rows, tokens of one context); the others have 300."""
LONGEST = 16384
"""Tokens that recorded steps allow for."""
WINDOW, WINDOWED = 4096, ((32, 4096), (32, 8192), (32, 14336))
TAIL = 5
"""Keys by which these contexts are shorter: few contexts end with a tile of keys."""
QUERIES = (1, 2, 4, 8)
PROMPTS = ((1, 8192, 0), (2, 4096, 0), (4, 2048, 0), (8, 1024, 0), (1, 1024, 0), (4, 2048, 6144), (1, 8192, 32_768))
"""(rows, tokens computed, tokens in the cache before)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--only",
        choices=("decode", "fused", "unequal", "verify", "prefill", "windows"),
        help="the others are left out",
    )
    parser.add_argument("--libraries", nargs="+", default=[], help="of flash_attn and flashinfer")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = AttentionSpec(args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5)
    runs = {"decode": decoding, "fused": fused, "unequal": unequal, "verify": verifying, "prefill": prompts}
    runs["windows"] = windows
    runs = {args.only: runs[args.only]} if args.only else runs
    if args.libraries:
        runs["libraries"] = functools.partial(through_libraries, names=args.libraries)
    if args.sweep:
        compile_all(spec, [name for name in runs if name in SHAPES])
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ceilings": ceilings(), "spec": str(spec)}
    print(json.dumps(report), flush=True)
    for name, run in runs.items():
        report[name] = list(run(spec, args.sweep))
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


def decoding(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    for (rows, length), (kind, dtype) in itertools.product(DECODING, KINDS.items()):
        nbytes = rows * length * 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        work = Work(spec, dtype, [length] * rows, [1] * rows, copies=max(1, (1 << 30) // nbytes))
        tried = [
            (shape, options)
            for shape, options in SHAPES["decode"]
            if (kind == "fp8_e4m3" or options["means_of"] == 2)
            and (options["num_splits"] == 1 or 200 <= rows * spec.num_kv_heads * options["num_splits"] <= 2100)
        ]
        for label, seconds in timed(work, "decode_shape", tried if sweep else []):
            yield show(f"decode {rows} x {length} {kind} {label}", seconds, {"tb_s": round(nbytes / seconds / 1e12, 3)})


def fused(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    for rows, length in FUSED:
        work = Work(spec, DTYPE, [length] * rows, [1] * rows, copies=32)
        work.step.max_seq_len = LONGEST
        served = fused_decode.serves
        for label, serves in (("one launch", lambda *_: True), ("several", lambda *_: False)):
            fused_decode.serves = serves
            seconds = seconds_of(work.whole())
            yield show(f"decode {rows} x {length} with rotation, {label}", seconds, {})
        fused_decode.serves = served


def unequal(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    for queries, (rows, longest) in itertools.product((1, 4), UNEQUAL):
        lengths = [longest, *[300] * (rows - 1)]
        nbytes = sum(lengths) * 2 * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize
        work = Work(spec, DTYPE, lengths, [queries] * rows, copies=max(2, min(24, (3 << 30) // nbytes)))
        work.step.max_seq_len = LONGEST
        seconds, rate = seconds_of(work.whole()), {"queries": queries}
        rate["tb_s"] = round(nbytes / seconds / 1e12, 3)
        yield show(f"{queries} queries of {rows} rows, one of {longest}", seconds, rate)


def verifying(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    for rows, length in VERIFYING:
        nbytes = rows * length * 2 * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize
        copies, one = max(1, (1 << 30) // nbytes), 0.0
        for queries in QUERIES:
            work = Work(spec, DTYPE, [length - TAIL] * rows, [queries] * rows, copies)
            for label, seconds in timed(work, "decode_shape", SHAPES["verify"] if sweep and queries == 8 else []):
                one = one or seconds
                rate = {"tb_s": round(nbytes / seconds / 1e12, 3), "of_one_query": round(one / seconds, 3)}
                yield show(f"verify {rows} x {length - TAIL}, {queries} queries {label}", seconds, rate)
            del work


def prompts(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    """In CUDA, where that kernel serves the layer, and in Triton."""
    for (rows, count, past), (kind, dtype) in itertools.product(PROMPTS, KINDS.items()):
        pairs = rows * (count * past + count * (count + 1) // 2)
        work = Work(spec, dtype, [past + count] * rows, [count] * rows, copies=1)
        for kernel in ("cuda", "triton") if work.runs_in_cuda else ("triton",):
            with nullcontext() if kernel == "cuda" else patch.object(prompt_tiles, "serves", lambda *_: False):
                shapes = SHAPES["prefill"] if sweep and kernel == "triton" else []
                for label, seconds in timed(work, "prefill_shape", shapes):
                    rate = 4 * spec.num_heads * spec.head_dim * pairs / seconds / 1e12
                    what = f"prefill {rows} x {count} after {past} {kind} {kernel} {label}"
                    yield show(what, seconds, {"tflop_s": round(rate, 1)})


def windows(spec: AttentionSpec, sweep: bool) -> Iterator[dict[str, Any]]:
    """Decoding, and prompts of one row, with windows and without."""
    for window, (rows, length) in itertools.product((WINDOW, None), WINDOWED):
        own, seen = replace(spec, window=window), min(length, window or length)
        nbytes = rows * seen * 2 * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize
        seconds = seconds_of(Work(own, DTYPE, [length] * rows, [1] * rows, copies=1).run())
        yield show(f"decode {rows} x {length}, window {window}", seconds, {"tb_s": round(nbytes / seconds / 1e12, 3)})
        pairs = length * seen - seen * (seen - 1) // 2
        seconds = seconds_of(Work(own, DTYPE, [length], [length], copies=1).run())
        rate = 4 * spec.num_heads * spec.head_dim * pairs / seconds / 1e12
        yield show(f"prefill 1 x {length}, window {window}", seconds, {"tflop_s": round(rate, 1)})


def through_libraries(spec: AttentionSpec, sweep: bool, names: list[str]) -> Iterator[dict[str, Any]]:
    """Prompts through each and, right after it, through Octavo's kernels, with the time until the first answer."""
    for name in names:
        request = BackendRequest(torch.device("cuda"), DTYPE, spec, PAGE)
        attention = select(name, request)
        if not isinstance(attention, LibraryAttention):
            raise SystemExit(f"{name} is no library")
        for rows, count, past in PROMPTS:
            work = Work(spec, DTYPE, [past + count] * rows, [count] * rows, copies=1)
            label = f"prefill {rows} x {count} after {past}"
            operations = 4 * spec.num_heads * spec.head_dim * rows * (count * past + count * (count + 1) // 2)
            began = time.perf_counter()
            through = work.through(attention)
            through[0]()
            torch.cuda.synchronize()
            first = round(time.perf_counter() - began, 3)
            seconds = seconds_of(through)
            rate = round(operations / seconds / 1e12, 1)
            yield show(f"{label} {name}", seconds, {"tflop_s": rate, "first_s": first})
            seconds = seconds_of(work.run())
            yield show(f"{label} octavo", seconds, {"tflop_s": round(operations / seconds / 1e12, 1)})


def show(label: str, seconds: float, rate: dict[str, float]) -> dict[str, Any]:
    print(f"{label:70s} {seconds * 1e6:9.1f} us  {rate}", flush=True)
    return {"what": label, "us": round(seconds * 1e6, 2), **rate}


def timed(work: Work, name: str, shapes: list[tuple[Shape, dict[str, Any]]]) -> Iterator[tuple[str, float]]:
    yield "", seconds_of(work.run())
    original = getattr(LAUNCHERS[name], name)
    found: list[tuple[str, float]] = []
    for shape, options in shapes:
        try:
            with Replaced(name, shape, options):
                found.append((f"{'/'.join(map(str, shape))} {options or ''}", seconds_of(work.run())))
        except Exception as error:
            print("  no", shape, options, str(error)[:120], flush=True)
    assert getattr(LAUNCHERS[name], name) is original
    yield from sorted(found, key=lambda pair: pair[1])[:7]


LAUNCHERS = {"decode_shape": triton_few, "prefill_shape": triton}
"""What asks for a shape, and for the options that go with it."""


class Replaced:
    """Within it the backend launches in this shape."""

    def __init__(self, name: str, shape: Shape, options: dict[str, Any]) -> None:
        self.where = LAUNCHERS[name]
        self.values = {name: lambda *_, **__: shape} | {
            key: (lambda *_, value=value: value) if callable(getattr(self.where, key)) else value
            for key, value in options.items()
        }

    def __enter__(self) -> None:
        self.before = {name: getattr(self.where, name) for name in self.values}
        for name, value in self.values.items():
            setattr(self.where, name, value)

    def __exit__(self, *_: Any) -> None:
        for name, value in self.before.items():
            setattr(self.where, name, value)


SHAPES: dict[str, list[tuple[Shape, dict[str, Any]]]] = {
    "decode": [
        (Shape(16, *shape), {"num_splits": splits, "means_of": means})
        for shape in (
            (32, 1, 3), (32, 1, 5), (64, 1, 5), (32, 2, 5), (64, 2, 3, 128), (64, 2, 5), (64, 4, 3),
        )
        for splits in (1, 2, 4, 8, 16, 32)
        for means in (2,)
    ],
    "verify": [(Shape(32, *shape), {}) for shape in ((32, 2, 5), (64, 2, 3), (64, 4, 3), (64, 4, 5), (128, 4, 3))],
    "prefill": [
        (Shape(*shape), {})
        for shape in (
            (128, 128, 8, 3), (128, 64, 8, 2, 128), (128, 128, 8, 3, None, True), (128, 64, 8, 2, 128, True),
            (128, 64, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3),
        )
    ],
}  # fmt: skip


class Work:
    """Rows of some lengths, of which the last tokens are computed."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, lengths: list[int], counts: list[int], copies: int):
        self.spec, self.copies = spec, copies
        self.lengths, self.counts = lengths, counts
        blocks = [-(-length // PAGE) for length in lengths]
        total = sum(counts)
        generator = torch.Generator("cuda").manual_seed(0)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        shape = (
            copies,
            *triton.TritonAttention(DTYPE, spec).cache_shape(spec, sum(blocks), PAGE),
        )
        cells = torch.empty(shape, dtype=DTYPE, device="cuda").normal_(generator=generator)
        self.caches = cells.to(dtype)
        self.scales = None if dtype == DTYPE else torch.ones(2, spec.num_kv_heads, device="cuda")
        self.qkv = torch.randn(total, heads, spec.head_dim, dtype=DTYPE, device="cuda", generator=generator)
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
        tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, part in enumerate(order.split(blocks)):
            tables[row, : len(part)] = part
        nothing = torch.zeros(total, dtype=torch.int64, device="cuda")
        self.step = StepInput(
            input_ids=nothing,
            positions=nothing,
            query_start=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda"),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            block_tables=tables.cuda(),
            slot_mapping=nothing,
            logit_rows=nothing,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            query_lens=counts,
            table_rows=torch.arange(len(lengths), dtype=torch.int32, device="cuda"),
            past_lens=[length - count for length, count in zip(lengths, counts, strict=True)],
        )

    @property
    def runs_in_cuda(self) -> bool:
        """Whether the CUDA kernel computes rows with many queries."""
        q, fresh = self.qkv[:, : self.spec.num_heads], self.qkv[:, self.spec.num_heads :]
        return prompt_tiles.serves(q, fresh, self.caches[0], self.step, self.spec)

    def run(self) -> tuple[Callable[[], Any], int]:
        """What to time, and how many times the work it is."""
        spec = self.spec
        self.step.attn = triton.TritonAttention(DTYPE, spec).prepare(self.step, PAGE)
        q, fresh = self.qkv[:, : spec.num_heads], self.qkv[:, spec.num_heads :]

        def run() -> Tensor | None:
            out = None
            for cache in self.caches:
                out = triton.attend_parts(q, fresh, cache, self.scales, self.step, spec)
            return out

        return run, self.copies

    def whole(self) -> tuple[Callable[[], Any], int]:
        """`run`, with rotation and storing."""
        attention = triton.TritonAttention(DTYPE, self.spec)
        self.step.attn = attention.prepare(self.step, PAGE)
        table = torch.ones(LONGEST, self.spec.head_dim, device="cuda")

        def run() -> Tensor | None:
            out = None
            for cache in self.caches:
                out = attention.rotate_and_attend(self.qkv, None, table, cache, None, self.step, self.spec)
            return out

        return run, self.copies

    def through(self, attention: LibraryAttention) -> tuple[Callable[[], Any], int]:
        """`run`, through a library."""
        spec, step = self.spec, self.step
        step.attn = attention.prepare(step, PAGE)
        q = self.qkv[:, : spec.num_heads]

        def run() -> Tensor | None:
            out = None
            for cache in self.caches:
                out = attention.attend(q, cache, step, spec)
            return out

        return run, self.copies


def seconds_of(work: tuple[Callable[[], Any], int]) -> float:
    """Median of a graph's replays, in one of which the work is done some times."""
    run, copies = work
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(20):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / copies)
    return statistics.median(times[8:])


def compile_all(spec: AttentionSpec, names: list[str]) -> None:
    """Every shape's kernels in several processes, which leave them in Triton's cache."""
    jobs = [
        (spec, name, dtype, shape, options)
        for name in names
        for shape, options in SHAPES[name]
        for kind, dtype in KINDS.items()
        if options.get("num_splits", 1) < 4
        and kind != "fp8_e5m2"
        and (kind == "fp8_e4m3" or options.get("means_of", 2) == 2)
        and (dtype == DTYPE or name != "verify")
    ]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.starmap(compile_one, jobs, chunksize=2)


COMPILED = {"decode": (64, 1), "verify": (60, 8), "prefill": (256, 192)}
"""Keys and queries of the rows for which shapes are compiled."""


def compile_one(spec: AttentionSpec, name: str, dtype: torch.dtype, shape: Shape, options: dict[str, Any]) -> None:
    lengths, count = COMPILED[name]
    lengths, counts = [lengths] * 2, [count] * 2
    try:
        with Replaced("prefill_shape" if name == "prefill" else "decode_shape", shape, options):
            run, _ = Work(spec, dtype, lengths, counts, 1).run()
            run()
    except Exception as error:
        print("  does not run:", shape, options, dtype, str(error)[:120], flush=True)


if __name__ == "__main__":
    main()
