"""The small launches of a prompt's step on a GPU, each as in a model: after others that used the caches.

    python benchmarks/prompt_kernels.py [--tokens 8192] [--output FILE]

Sorting choices of experts, rotation and storing, sums with norms, in the shapes of Qwen3-30B-A3B and Llama 3.1 8B. A
large product and a pass over more memory than the L2 cache holds come before each launch, so that neither data nor
instructions are cached. Figures are medians of what the profiler says: from the start of the first kernel, or the end
of the one that gives the input, to the end of the last. `share` is that of the rate of a large copy. Each line has the
chosen launch and other candidates, the constants of their modules changed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_workloads import ceilings
from machine import Report, describe, describe_gpu
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from octavo.nn.attention import triton as attention
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_products, triton_norm
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.step import StepInput

KIND: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
PAGE, RUNS = 16, 20
OWN = ("sort_kernel", "scan_kernel", "place_kernel", "rotate_write", "sum_norm_kernel", "_norm_kernel")
NEVER = 10**9


class Shape(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    normed: bool
    experts: int
    top_k: int


SHAPES = {"qwen3-30b-a3b": Shape(2048, 32, 4, True, 128, 8), "llama-3.1-8b": Shape(4096, 32, 8, False, 0, 0)}


@contextmanager
def changed(module: Any, **constants: int) -> Iterator[None]:
    before = {name: getattr(module, name) for name in constants}
    try:
        for name, value in constants.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class Clock:
    """Measures launches whose inputs and instructions are not cached."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1 << 27, device="cuda")
        self._matrix = torch.randn(4096, 4096, **KIND)

    def us(self, run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        """Return the microseconds of `run`, from the end of `before` on if given."""
        for _ in range(2):
            if before is not None:
                before()
            run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(RUNS):
                torch.mm(self._matrix, self._matrix)
                self._memory.add_(1.0)
                if before is not None:
                    before()
                run()
            torch.cuda.synchronize()
        return statistics.median(_spans(_kernels(found), "route_kernel" if before is not None else ""))


def _kernels(found: profile) -> list[tuple[float, float, str]]:
    """Return the start, end and name of each kernel, in µs, by start."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        found.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    return sorted((one["ts"], one["ts"] + one["dur"], one["name"]) for one in kernels)


def _spans(kernels: list[tuple[float, float, str]], after: str) -> list[float]:
    """Return how long each group of adjacent launches in OWN took."""
    spans: list[float] = []
    start: float | None = None
    given = 0.0
    for begin, end, name in kernels:
        if name.startswith(OWN):
            if start is None:
                start = given if after else begin
                spans.append(0.0)
            spans[-1] = max(spans[-1], end - start)
        else:
            start = None
            given = end if after and name.startswith(after) else given
    return spans


class Bench:
    def __init__(self, report: Report, copy_tb_s: float) -> None:
        self._report, self._copy = report, copy_tb_s
        self._clock = Clock()

    def note(self, name: str, how: str, nbytes: int, run: Callable[[], object], **more: Any) -> None:
        try:
            us = self._clock.us(run, **more)
        except Exception as failure:  # a candidate that does not compile or fit
            self._report.note(f"{name}: {how}", str(failure)[:200])
            return
        rate = nbytes / us / 1e6
        figures = {"us": round(us, 1), "gb_s": round(1e3 * rate), "share": round(rate / self._copy, 2)}
        self._report.note(f"{name}: {how}", figures)

    def sort(self, name: str, shape: Shape, tokens: int) -> None:
        form = ExpertsForm(num_experts=shape.experts, hidden_size=1, size=1)
        stacked = StackedWeights(torch.empty(shape.experts, 0, **KIND), torch.empty(shape.experts, 0, **KIND))
        logits, spec = torch.randn(tokens, shape.experts, **KIND), RoutingSpec(top_k=shape.top_k, normalized=True)
        routing = expert_products.route_on_device(logits, spec)
        fresh = [routing]

        def route() -> None:
            fresh[0] = expert_products.route_on_device(logits, spec)

        def run() -> None:
            expert_products.sort(fresh[0], stacked, form, 128 if tokens > 512 else 32)

        candidates = {"one launch": {"_FEW_CHUNKS": NEVER}}
        candidates |= {f"two, {count} chunks a program": {"_FEW_CHUNKS": 0, "_SCANNED": count} for count in (8, 16, 32)}
        nbytes = 8 * routing.experts.numel()
        for how, constants in {"chosen": {}, **candidates}.items():
            with changed(expert_products, **constants):
                self.note(f"sort, {name}, {tokens}", how, nbytes, run, before=route)

    def rotate(self, name: str, shape: Shape, tokens: int) -> None:
        all_heads, dim = shape.heads + 2 * shape.kv_heads, 128
        qkv = torch.randn(tokens, all_heads, dim, **KIND)
        cache = torch.zeros(tokens // PAGE + 1, 2, shape.kv_heads, PAGE, dim, **KIND)
        norms = (torch.ones(dim, **KIND), torch.ones(dim, **KIND), 1e-6) if shape.normed else None
        cos_sin = torch.randn(32768, dim, device="cuda")
        step, kept = step_of(tokens), tokens >= 512

        def run() -> None:
            attention.rotate_and_write(qkv, norms, cos_sin, cache, None, step, kept)

        written = shape.heads + (3 if kept else 2) * shape.kv_heads
        candidates = {f"few, {each} a thread": {"MANY_WRITTEN": NEVER, "_PER_THREAD": each} for each in (4, 8)}
        for count in (512, 1024, 2048, 4096) if tokens > 1024 else (1024, 2048):
            for each in (8, 16) if tokens > 1024 else (8,):
                how = f"many, {count} a program, {each} a thread"
                candidates[how] = {"MANY_WRITTEN": 0, "_WRITTEN": count, "_PER_THREAD": each}
        for how, constants in {"chosen": {}, **candidates}.items():
            with changed(attention, **constants):
                self.note(f"rotate, {name}, {tokens}", how, 2 * tokens * dim * (all_heads + written), run)

    def norm(self, name: str, shape: Shape, tokens: int) -> None:
        x, stream = torch.randn(1, tokens, shape.hidden, **KIND), torch.randn(tokens, shape.hidden, **KIND)
        weight = torch.ones(shape.hidden, **KIND)

        def run() -> None:
            triton_norm.sum_rms_norm(x, stream, weight, 1e-6)

        candidates = {f"{count} a warp": {"_PER_WARP": count} for count in (128, 256, 512, 1024, 2048)}
        for how, constants in {"chosen": {}, **candidates}.items():
            with changed(triton_norm, **constants):
                self.note(f"norm, {name}, {tokens}", how, 8 * stream.numel(), run)

    def sum_norm(self, name: str, shape: Shape, tokens: int) -> None:
        form = ExpertsForm(num_experts=shape.experts, hidden_size=shape.hidden, size=1)
        logits, spec = torch.randn(tokens, shape.experts, **KIND), RoutingSpec(top_k=shape.top_k, normalized=True)
        routing = expert_products.route_on_device(logits, spec)
        stream = torch.randn(tokens, shape.hidden, **KIND)
        rows = torch.randn(tokens * shape.top_k, shape.hidden, **KIND)
        norm = (torch.ones(shape.hidden, **KIND), 1e-6)
        summed = expert_products.ExpertRows(rows, routing, 0, shape.experts, form, None)

        def run() -> None:
            summed.normed_with(stream, norm, stream.dtype)

        candidates = {f"{count} a warp": {"_PER_WARP": count} for count in (128, 256, 512, 1024)}
        nbytes = 2 * (rows.numel() + 3 * stream.numel())
        for how, constants in {"chosen": {}, **candidates}.items():
            with changed(expert_products, **constants):
                self.note(f"sum and norm, {name}, {tokens}", how, nbytes, run)


def step_of(tokens: int) -> StepInput:
    nothing = torch.empty(0, dtype=torch.int32, device="cuda")
    places: Tensor = torch.arange(tokens, device="cuda")
    return StepInput(
        input_ids=nothing.long(),
        positions=places % 4096,
        query_start=nothing,
        seq_lens=nothing,
        block_tables=nothing,
        slot_mapping=places,
        logit_rows=nothing.long(),
        max_query_len=1,
        max_seq_len=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--few", type=int, nargs="+", default=[1, 64, 256, 512, 1024], help="for rotation and sorting")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    found = ceilings()
    report = Report({**describe(), "gpu": describe_gpu()}, args.output)
    report.note("ceilings", found)
    bench = Bench(report, found["copy_tb_s"])
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            for tokens in args.tokens:
                if shape.experts:
                    bench.sort(name, shape, tokens)
                    bench.sum_norm(name, shape, tokens)
                bench.rotate(name, shape, tokens)
                bench.norm(name, shape, tokens)
            for tokens in args.few:
                bench.rotate(name, shape, tokens)
                if shape.experts and tokens > 4:
                    bench.sort(name, shape, tokens)


if __name__ == "__main__":
    main()
