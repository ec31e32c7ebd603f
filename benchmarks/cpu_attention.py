"""How long one layer's attention takes on a CPU with each instruction set that it has: prompts, and steps of decoding.

    python benchmarks/cpu_attention.py [--heads 9 --kv-heads 3 --head-dim 64] [--isa NAME ...] [--output FILE]

Keys and values are arbitrary and in bfloat16. Decoding goes over several caches in turns, as a model's layers do, so
that they come from memory. The instruction sets take turns in one process; the median counts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe

from octavo.native.isa import usable
from octavo.native.program import Pool
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.native import NativeAttention
from octavo.nn.step import StepInput

HERE = Path(__file__).resolve().parent
BLOCK = 16
STEPS = ((1, 2048, 2048), (1, 8192, 8192), (1, 1, 2048), (16, 1, 2048))
"""Requests, new tokens of each, tokens of context of each."""
LAYERS = 8


def step_of(requests: int, queries: int, context: int) -> StepInput:
    blocks = context // BLOCK
    total = requests * queries
    return StepInput(
        input_ids=torch.zeros(total, dtype=torch.long),
        positions=torch.arange(context - queries, context).repeat(requests),
        query_start=torch.arange(requests + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((requests,), context, dtype=torch.int32),
        block_tables=torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks),
        slot_mapping=torch.zeros(total, dtype=torch.long),
        logit_rows=torch.arange(requests),
        max_query_len=queries,
        max_seq_len=context,
    )


def measure(
    backends: dict[str, NativeAttention], spec: AttentionSpec, shape: tuple[int, int, int], repeats: int
) -> dict[str, float]:
    """Milliseconds of a layer, for each of the backends."""
    requests, queries, context = shape
    step = step_of(*shape)
    q = torch.randn(requests * queries, spec.num_heads, spec.head_dim).bfloat16()
    size = next(iter(backends.values())).cache_shape(spec, requests * context // BLOCK, BLOCK)
    caches = [torch.randn(size).bfloat16() for _ in range(LAYERS if queries == 1 else 1)]
    taken: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(repeats + 1):
        for name, backend in backends.items():
            step.attn = backend.prepare(step, BLOCK)
            for cache in caches:
                started = time.perf_counter()
                backend.attend(q, cache, step, spec)
                taken[name].append(time.perf_counter() - started)
    return {name: round(1000 * median(times[len(caches) :]), 3) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", nargs="+", default=[level.name for level in usable()])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "cpu_attention.json")
    args = parser.parse_args()
    spec = AttentionSpec(args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5)
    backends = {isa: NativeAttention(Pool(args.threads, isa)) for isa in args.isa}
    table: list[dict[str, Any]] = []
    for shape in STEPS:
        ms = measure(backends, spec, shape, args.repeats)
        table.append(dict(zip(("requests", "new", "context"), shape, strict=True)) | {"ms": ms})
        print(table[-1], flush=True)
    result = {"machine": describe(), "threads": args.threads, "spec": repr(spec), "layers": table}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
