"""The six offline workloads on one GPU, with random weights of a real model's shape: engine only, token ids in and out.

    python benchmarks/gpu_workloads.py [--model DIR] [--workloads chat decode ...] [--runs 3] [--output FILE]

Greedy, end-of-sequence ignored, all requests handed over at once, every run with other tokens so that no run finds the
last one's prefixes. The engine is warm: each workload runs once, scaled down, before it is timed. Figures are medians.
Beside them stand what the chip itself does: its copy bandwidth and its rate of bfloat16 matrix products.

`start_s` counts from the exec of this process until the engine is ready, so Python's imports and the CUDA context are
in it; the other process that measures the chip meanwhile is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import seconds_since_exec

from octavo.bench.workloads import WORKLOADS, Work, workload
from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.hub.files import ModelFiles

HERE = Path(__file__).parent
VOCAB = 128_000
"""Prompts draw from this many ids, or from the model's vocabulary where that is smaller."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, help="by default as LLM has it")
    parser.add_argument("--scheduling-policy", default="longest-first", help="as LLM has it; or fcfs")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--disable-cascade-attn", action="store_true")
    parser.add_argument("--attention-backend", help="triton, flash_attn or flashinfer; by default the fastest")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8_e4m3 or fp8_e5m2")
    parser.add_argument("--quantization", help="round the random weights: fp8, w8a8, w8a16 or w4a16")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-p 0.95, top-k 50, penalty 1.1")
    parser.add_argument("--settings", type=json.loads, default={}, help='others of EngineConfig: {"model_impl": "..."}')
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    began = time.perf_counter()
    report: dict[str, Any] = {"torch": torch.__version__, "ceilings": ceilings_alone()}
    print(json.dumps(report), flush=True)
    aside = time.perf_counter() - began
    files = files_of(args.model)
    loop, info = build_core(config_of(args), files)
    gc.collect()
    gc.freeze()  # as the server does once it is ready
    report |= {"start_s": round(seconds_since_exec() - aside, 2), "phases_s": info.phases, "memory": info.memory}
    report |= {"device": torch.cuda.get_device_name()}
    report |= {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": info.max_num_batched_tokens}
    report |= {
        "sampled": args.sampled,
        "eager": args.enforce_eager,
        "disable_cascade_attn": args.disable_cascade_attn,
        "scheduling_policy": args.scheduling_policy,
        "kv_blocks": info.num_blocks,
    }
    report |= {"kv_form": info.kv_form, "attention_backend": args.attention_backend}
    report |= {"model": args.model.name, "quantization": args.quantization, "settings": args.settings}
    print(json.dumps(report), flush=True)
    report["workloads"] = {}
    vocab = min(files.config["vocab_size"], VOCAB)
    for name in args.workloads:
        measure(loop, workload(name, seed=-1, vocab_size=vocab, scale=0.1), args.sampled)
        seeds = range(args.runs)
        runs = [measure(loop, workload(name, seed=seed, vocab_size=vocab), args.sampled) for seed in seeds]
        median = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
        report["workloads"][name] = median | {"all_seconds": [run["seconds"] for run in runs]}
        print(name, json.dumps(report["workloads"][name]), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


def config_of(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig.of(
        load_format="dummy",
        device="cuda",
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=16384,
        scheduling_policy=args.scheduling_policy,
        enforce_eager=args.enforce_eager,
        disable_cascade_attn=args.disable_cascade_attn,
        kv_cache_dtype=args.kv_cache_dtype,
        quantization=args.quantization,
        attention_backend=args.attention_backend,
        **{"performance_mode": "throughput"} | args.settings,  # as LLM has it
    )


def files_of(folder: Path) -> ModelFiles:
    config = json.loads((folder / "config.json").read_text())
    return ModelFiles(name=folder.name, path=folder, format="safetensors", weights=(), config=config)


def measure(loop: EngineLoop, work: list[Work], sampled: bool) -> dict[str, Any]:
    """Runs the work to its end; seconds, rates, and where the host's time went."""
    how: dict[str, Any] = (
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1} if sampled else {"temperature": 0}
    )
    loop.forget_past()
    began = time.perf_counter()
    for i, (prompt, count) in enumerate(work):
        params = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **how)
        loop.add(GenerateRequest(id=f"{began}-{i}", tokens=prompt, params=params))
    produced = 0
    while loop.busy:
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            produced += len(delta.tokens)
    seconds = time.perf_counter() - began
    expected = sum(count for _, count in work)
    if produced != expected:
        raise RuntimeError(f"{produced} tokens came, not {expected}")
    stats = loop.stats()
    given = sum(len(prompt) for prompt, _ in work)
    return {
        "requests": len(work),
        "seconds": round(seconds, 4),
        "output_tok_s": round(produced / seconds, 1),
        "input_tok_s": round(given / seconds, 1),
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "plan_s": round(stats.plan_s, 3),
        "launch_s": round(stats.launch_s, 3),
        "retire_s": round(stats.retire_s, 3),
        "exposed_host_ms_a_step": round(stats.idle_s / max(1, stats.num_steps) * 1e3, 4),
    }


def ceilings() -> dict[str, float]:
    """Bytes read and written a second by a large copy, and bfloat16 operations a second of a large product."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = best(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = best(lambda: a @ b)
    return {
        "copy_tb_s": round(2 * source.numel() / copy / 1e12, 2),
        "bf16_tflop_s": round(2 * 8192**3 / product / 1e12),
    }


def ceilings_alone() -> dict[str, float]:
    """The same from a process of its own: in this one it would create the CUDA context, which belongs to the start."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(ceilings).result()


def best(run: Any) -> float:
    """Median seconds of ten, by device events."""
    times = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
