"""Latent attention alone on one GPU: bytes of latents a second of decoding, operations a second of prompts.

    python benchmarks/gpu_latent.py [--model DIR] [--sweep] [--unequal] [--output FILE]

Random latents, block tables permuted; times are medians of a graph's replays over several caches, so that nothing is
found in the L2 cache. `attend` has the products with the heads' matrices, `kernel` only reads the cache and merges its
parts, `triton` does that without the kernel in CUDA (`nn/latent/latent_decode.py`). Prompts count the operations of the
causal half and of the product that expands latents. --sweep tries divisions of the kernel in CUDA, launch shapes of
those in Triton (`nn/latent/triton_shapes.py`) and their numbers of parts, and compares their results. --unequal only
decodes batches with one long context.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_workloads import ceilings
from machine import describe, describe_gpu

from octavo.device.ahead import Ahead, target_of
from octavo.models.attention import latent_spec
from octavo.models.registry import spec_of
from octavo.nn.attention.triton_few import num_splits
from octavo.nn.latent import latent_decode, triton
from octavo.nn.latent.base import LatentSpec
from octavo.nn.latent.triton_shapes import AbsorbedShape, ExpandedShape
from octavo.nn.step import StepInput

HERE = Path(__file__).parent
DTYPE = torch.bfloat16
PAGE = 16
DECODING = ((256, 1024), (64, 2048), (32, 8192), (8, 4096), (1, 1024), (1, 16384))
UNEQUAL = tuple((rows, longest) for rows in (8, 16, 32, 64, 128, 256) for longest in (300, 4000, 16000))
"""(rows, tokens of one context); the others have 300."""
SPLITS, PARTS = (1, 2, 4, 8, 16), latent_decode.PARTS
PROMPTS = ((4, 2048), (1, 8192))
SHAPES = [(32, 4, 2), (32, 4, 5), (32, 4, 7), (32, 8, 5), (64, 8, 2), (64, 8, 5), (16, 4, 5), (16, 4, 7)]
EXPANDED = [(128, 64, 8, 3), (128, 64, 4, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 4, 3)]


class Work:
    """Decoding: rows of one length, or one of them longer, over several caches."""

    def __init__(self, spec: LatentSpec, rows: int, length: int, longest: int | None = None) -> None:
        self.spec, self.rows, self.length = spec, rows, length
        lengths = [longest or length, *[length] * (rows - 1)]
        self.nbytes = sum(lengths) * spec.width * DTYPE.itemsize
        blocks = [-(-each // PAGE) for each in lengths]
        copies = min(24, max(1, (1 << 30) // self.nbytes))
        kind: dict[str, Any] = {"dtype": DTYPE, "device": "cuda"}
        self.backend = triton.TritonLatents(DTYPE, spec)
        shape = self.backend.cache_shape(spec, sum(blocks), PAGE)
        ids = torch.randperm(sum(blocks), device="cuda").int().split(blocks)
        self.caches = [torch.randn(shape, **kind) for _ in range(copies)]
        self.q = torch.randn(rows, spec.num_heads, spec.query_dim, **kind)
        self.expansion = torch.randn(spec.num_heads, spec.expanded_dim, spec.rank, **kind) * spec.rank**-0.5
        counted: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
        self.step = StepInput(
            input_ids=torch.zeros(rows, dtype=torch.long, device="cuda"),
            positions=torch.tensor(lengths, device="cuda") - 1,
            query_start=torch.arange(rows + 1, **counted),
            seq_lens=torch.tensor(lengths, **counted),
            block_tables=torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
            slot_mapping=torch.zeros(rows, dtype=torch.long, device="cuda"),
            logit_rows=torch.arange(rows, device="cuda"),
            max_query_len=1,
            max_seq_len=16384,
        )
        self.step.attn = self.backend.prepare(self.step, PAGE)

    def attend(self, i: int) -> torch.Tensor:
        return self.backend.attend(self.q, self.q[:, 0], self.expansion, self.caches[i], self.step, self.spec)

    def kernel(self) -> Callable[[int], torch.Tensor]:
        spec, few = self.spec, self.step.attn.few
        low = torch.randn(spec.num_heads, self.rows, spec.rank, dtype=DTYPE, device="cuda")
        mixed = torch.empty(self.rows, spec.num_heads, spec.rank, dtype=DTYPE, device="cuda")

        def run(i: int) -> torch.Tensor:
            cache = self.caches[i]
            triton._decode(low, self.q, cache, self.step, spec, few, mixed)
            return mixed

        return run

    def splits(self, each: int) -> int:
        """Return the number of parts of a context, `each` times fewer than those of other attention."""
        return num_splits(each * self.rows, self.step.max_seq_len, self.q.device)


class Prompts:
    """Whole prompts of one length."""

    def __init__(self, spec: LatentSpec, rows: int, length: int) -> None:
        self.spec, self.rows, self.length = spec, rows, length
        tokens, blocks = rows * length, -(-length // PAGE)
        kind: dict[str, Any] = {"dtype": DTYPE, "device": "cuda"}
        self.flops = spec.num_heads * rows * length * (length + 1) * (spec.query_dim + spec.value_dim)
        self.flops += 2 * tokens * spec.rank * spec.num_heads * spec.expanded_dim
        self.backend = triton.TritonLatents(DTYPE, spec)
        self.cache = torch.zeros(self.backend.cache_shape(spec, rows * blocks, PAGE), **kind)
        self.q = torch.randn(tokens, spec.num_heads, spec.query_dim, **kind)
        self.latents = torch.randn(tokens, spec.width, **kind)
        self.expansion = torch.randn(spec.num_heads, spec.expanded_dim, spec.rank, **kind) * spec.rank**-0.5
        self.step = StepInput(
            input_ids=torch.zeros(tokens, dtype=torch.long, device="cuda"),
            positions=torch.arange(length, device="cuda").repeat(rows),
            query_start=torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda"),
            seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
            block_tables=torch.arange(rows * blocks, dtype=torch.int32, device="cuda").view(rows, blocks),
            slot_mapping=torch.arange(tokens, device="cuda"),
            logit_rows=torch.arange(rows, device="cuda"),
            max_query_len=length,
            max_seq_len=length,
            query_lens=[length] * rows,
            past_lens=[0] * rows,
        )
        self.prepare()

    def prepare(self) -> None:
        self.step.attn = self.backend.prepare(self.step, PAGE)

    def attend(self, _: int) -> torch.Tensor:
        return self.backend.attend(self.q, self.latents, self.expansion, self.cache, self.step, self.spec)

    def measure(self) -> dict[str, Any]:
        seconds = seconds_of(self.attend, 4)
        found = {"rows": self.rows, "length": self.length, "us": round(seconds * 1e6, 1)}
        return {**found, "tflop_s": round(self.flops / seconds / 1e12, 1)}

    def sweep(self) -> list[Any]:
        found, chosen, expected = [], triton.expanded_shape, self.attend(0).float()
        for shape in EXPANDED:
            triton.expanded_shape = lambda *_, shape=shape: ExpandedShape(*shape)  # type: ignore[assignment]
            try:
                self.prepare()
                error = ((self.attend(0).float() - expected).norm() / expected.norm()).item()
                if not error < 0.02:
                    print("WRONG", shape, error, flush=True)
                found.append((round(seconds_of(self.attend, 4) * 1e6, 1), shape))
            except Exception as failure:  # a candidate that does not compile or fit
                print("FAILED", shape, str(failure)[:100], flush=True)
        triton.expanded_shape = chosen
        self.prepare()
        return sorted(found)


def seconds_of(run: Callable[[int], object], count: int) -> float:
    """Return the seconds of one call, of `count` recorded in a graph; the median of seven replays."""
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times[1:])


def measure(work: Work, copy_tb_s: float) -> dict[str, Any]:
    count = len(work.caches)
    found: dict[str, Any] = {"rows": work.rows, "length": work.length}

    def time(name: str, run: Callable[[int], object]) -> None:
        seconds = seconds_of(run, count)
        rate = work.nbytes / seconds / 1e12
        found.update({f"{name}_us": round(seconds * 1e6, 1), f"{name}_tb_s": round(rate, 2)})
        found[f"{name}_share"] = round(rate / copy_tb_s, 3)

    time("attend", work.attend)
    time("kernel", work.kernel())
    with in_triton():
        time("triton", work.kernel())
    return found


def unequal(spec: LatentSpec, copy_tb_s: float) -> Iterator[dict[str, Any]]:
    for rows, longest in UNEQUAL:
        found = measure(Work(spec, rows, 300, longest), copy_tb_s) | {"longest": longest}
        print(json.dumps(found), flush=True)
        yield found


@contextmanager
def in_triton() -> Iterator[None]:
    with mock.patch.object(latent_decode, "serves", return_value=False):
        yield


def shapes(spec: LatentSpec) -> Iterator[AbsorbedShape]:
    given = triton.absorbed_shape(DTYPE, spec.num_heads, 1)
    yield given
    for keys, warps, stages in SHAPES:
        yield given._replace(keys=keys, warps=warps, stages=stages)


def candidates(work: Work) -> Iterator[tuple[Any, ExitStack]]:
    """Return ways to decode, and what selects each."""
    for divided in itertools.starmap(latent_decode.Division, itertools.product(SPLITS, PARTS)):
        if divided.splits * divided.parts * work.rows <= 1024:
            chosen = ExitStack()
            chosen.enter_context(mock.patch.object(latent_decode, "division", lambda *_, divided=divided: divided))
            yield divided, chosen
    for shape in shapes(work.spec):
        for parts in sorted({work.splits(each) for each in (1, 2, 4, 8)}):
            chosen = ExitStack()
            chosen.enter_context(in_triton())
            chosen.enter_context(mock.patch.object(triton, "absorbed_shape", lambda *_, shape=shape: shape))
            chosen.enter_context(mock.patch.object(triton, "num_splits", lambda *_, parts=parts: parts))
            yield (*shape, parts), chosen


def sweep(work: Work) -> list[Any]:
    """Return the fastest as (µs, candidate)."""
    found = []
    expected = work.attend(0).float()
    for candidate, chosen in candidates(work):
        with chosen:
            try:
                error = ((work.attend(0).float() - expected).norm() / expected.norm()).item()
                if not error < 0.02:
                    print("WRONG", candidate, error, flush=True)
                found.append((round(seconds_of(work.kernel(), len(work.caches)) * 1e6, 1), candidate))
            except Exception as failure:  # a candidate that does not compile or fit
                print("FAILED", candidate, str(failure)[:100], flush=True)
    return sorted(found)


def compile_all(works: list[Work], prompts: Prompts) -> None:
    ahead = Ahead(target_of(torch.device("cuda")))
    with ahead.collecting():
        for work in works:
            for _, chosen in candidates(work):
                with chosen:
                    work.kernel()(0)
        wide = triton.expanded_shape
        for each in EXPANDED:
            triton.expanded_shape = lambda *_, each=each: ExpandedShape(*each)  # type: ignore[assignment]
            prompts.prepare()
            prompts.attend(0)
        triton.expanded_shape = wide
        prompts.prepare()
    print("compiled", ahead.wait(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "deepseek-v2-lite")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--unequal", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    model = spec_of(json.loads((args.model / "config.json").read_text()))
    spec = latent_spec(model, 0)
    torch.manual_seed(0)
    report: dict[str, Any] = {**describe(), "gpu": describe_gpu(), "ceilings": ceilings(), "spec": str(spec)}
    print(json.dumps(report["ceilings"]), flush=True)
    with torch.inference_mode():
        if args.unequal:
            report["unequal"] = list(unequal(spec, report["ceilings"]["copy_tb_s"]))
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
            return
        works = [Work(spec, rows, length) for rows, length in DECODING]
        if args.sweep:
            compile_all(works, Prompts(spec, 1, 256))
        report["decode"] = [measure(work, report["ceilings"]["copy_tb_s"]) for work in works]
        print(*map(json.dumps, report["decode"]), sep="\n", flush=True)
        report["sweep"] = [[work.rows, work.length, sweep(work)] for work in works] if args.sweep else []
        for rows, length, found in report["sweep"]:
            print(rows, length, *found[:6], sep="\n  ", flush=True)
        prompts = [Prompts(spec, rows, length) for rows, length in PROMPTS]
        report["prompts"] = [one.measure() for one in prompts]
        print(*map(json.dumps, report["prompts"]), sep="\n", flush=True)
        report["prompt_sweep"] = [[one.rows, one.length, one.sweep()] for one in prompts] if args.sweep else []
        print(*report["prompt_sweep"], sep="\n", flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
