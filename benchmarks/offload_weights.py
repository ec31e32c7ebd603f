"""Weights in the host's memory (--cpu-offload-gb) on one GPU: steps of Llama 3.1 8B's shape with random weights.

    python benchmarks/offload_weights.py [--gib 0 2 6 12] [--streams 1 64 256] [--output FILE]

For each amount of memory that is freed, an engine of its own: milliseconds of a step in which some streams decode, and
input tokens a second of prompts in steps of 8,192 tokens. `host_gb_s` is what a copy of a layer's size from pinned
memory reaches on this machine, and `floor_ms` the time of copying a step's weights at that rate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import files_of
from machine import Report, describe, describe_gpu

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.device.cuda_transfer import CudaFeed
from octavo.engine.loop import EngineLoop

HERE = Path(__file__).parent
LAYER = 436_224_000
"""Bytes of a layer's weights."""
CONTEXT, TOKENS, CHUNK = 256, 48, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--gib", type=float, nargs="+", default=[0.0, 2.0, 6.0, 12.0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report = Report(describe() | {"gpu": describe_gpu()}, args.output)
    rate = host_rate()
    report.note("host_gb_s", round(rate / 1e9, 2))
    for gib in args.gib:
        report.note(f"{gib:g} GiB", measured(args, gib, rate))


def measured(args: argparse.Namespace, gib: float, rate: float) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    config = EngineConfig.of(
        load_format="dummy",
        device="cuda",
        max_num_seqs=max(args.streams),
        max_num_batched_tokens=CHUNK,
        max_model_len=CHUNK + 64,
        memory_bytes=24 << 30,
        enable_prefix_caching=False,
        cpu_offload_gb=gib,
    )
    began = time.perf_counter()
    loop, info = build_core(config, files_of(args.model))
    found: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 1), "phases": info.phases}
    found["device_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
    if gib:
        layers = 2 + -(-int(gib * 2**30) // LAYER)
        found |= {"layers": layers, "floor_ms": round(layers * LAYER / rate * 1e3, 1)}
    for streams in args.streams:
        steps = [decode(loop, streams) for _ in range(3)]
        found[f"{streams} streams, ms a step"] = [round(step * 1e3, 2) for step in steps]
    found["prompts, tokens/s"] = [round(prompts(loop)) for _ in range(3)]
    loop.close()
    torch.cuda.empty_cache()
    return found


def decode(loop: EngineLoop, streams: int) -> float:
    """Return the median seconds of a step in which all streams decode."""
    add(loop, [CONTEXT] * streams, TOKENS)
    last, steps = time.perf_counter(), []
    while loop.busy:
        count = sum(len(delta.tokens) for delta in loop.step())
        before, last = last, time.perf_counter()
        if count == streams:
            steps.append(last - before)
    return statistics.median(steps)


def prompts(loop: EngineLoop) -> float:
    """Return the input tokens a second of eight prompts that each fill a step."""
    add(loop, [CHUNK] * 8, 1)
    began = time.perf_counter()
    while loop.busy:
        loop.step()
    return 8 * CHUNK / (time.perf_counter() - began)


def add(loop: EngineLoop, lengths: list[int], tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
    for i, length in enumerate(lengths):
        prompt = [random.randrange(128_000) for _ in range(length)]
        loop.add(GenerateRequest(id=f"{time.perf_counter()}-{i}", tokens=prompt, params=params))


def host_rate() -> float:
    """Return the bytes a second of copies from pinned memory."""
    feed, target = CudaFeed(torch.device("cuda")), torch.empty(LAYER, dtype=torch.uint8, device="cuda")
    source = feed.room(LAYER)
    found = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        feed.send([(source.bytes, target)])
        torch.cuda.synchronize()
        found.append(LAYER / (time.perf_counter() - began))
    return statistics.median(found)


if __name__ == "__main__":
    main()
