"""What LoRA adapters cost on one GPU: `decode` and `single` on a model of Llama 3.1 8B's shape, with random weights.

    python benchmarks/lora_decode.py [--adapters 0 1 8 64] [--output-tokens 512] [--runs 3] [--output FILE]

Two engines in one process, without and with LoRA, run in turns, since the clocks of a GPU drift. All adapters have the
same rank and change all linear layers; requests are spread over those in use. With 0 adapters, LoRA is enabled, all
adapters are on the device, and no request names one. Step times are medians of steps in which all requests decode.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import files_of
from machine import describe, describe_gpu
from safetensors.torch import save_file

from octavo.bench.workloads import Work, workload
from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

HERE = Path(__file__).parent
WITHOUT = "without LoRA"
STREAMS = {"decode": 256, "single": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--workloads", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--output-tokens", type=int, help="fewer tokens a request than the workload has")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-gib", type=int, default=32, help="KV cache of each engine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    report: dict[str, Any] = describe() | {"gpu": describe_gpu(), "rank": args.rank}
    names = [f"adapter{i}" for i in range(max(args.adapters))]
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((args.model / "config.json").read_text())
        save_adapter(Path(folder), config, args.rank)
        plain, report["start_s"] = built(args, {})
        modules = tuple(f"{name}={folder}" for name in names)
        adapted, report["start_with_lora_s"] = built(args, {"lora_modules": modules, "max_loras": max(1, len(names))})
        began = time.perf_counter()
        run(adapted, workload("decode", seed=-2), names, output_tokens=2)
        report["first_use_s"] = round(time.perf_counter() - began, 2)
        print(json.dumps(report), flush=True)
        report["workloads"] = {}
        for name in args.workloads:
            forms: dict[str, tuple[EngineLoop, list[str]]] = {WITHOUT: (plain, [])}
            counts = [count for count in args.adapters if count <= STREAMS[name]]
            forms |= {f"{count} adapters": (adapted, names[:count]) for count in counts}
            report["workloads"][name] = compared(name, forms, args)
            print(name, json.dumps(report["workloads"][name]), flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")


def built(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[EngineLoop, float]:
    """Return an engine, and the seconds that it took to start."""
    config = EngineConfig.of(
        load_format="dummy",
        device="cuda",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        memory_bytes=args.kv_gib << 30,
        **settings,
    )
    began = time.perf_counter()
    loop, _ = build_core(config, files_of(args.model))
    taken = round(time.perf_counter() - began, 2)
    print(f"started in {taken} s", flush=True)
    return loop, taken


def save_adapter(folder: Path, config: dict[str, Any], rank: int) -> None:
    """Write an adapter with random weights for all linear layers, as PEFT does."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs, dtype=torch.bfloat16) * inputs**-0.5
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank, dtype=torch.bfloat16) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))


def compared(name: str, forms: dict[str, tuple[EngineLoop, list[str]]], args: argparse.Namespace) -> dict[str, Any]:
    """Run a workload in all forms, in turns; return the medians, and their ratios to those without LoRA."""
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for seed in range(-1, args.runs):
        for form, (loop, names) in forms.items():
            taken = run(loop, workload(name, seed=seed), names, args.output_tokens if seed >= 0 else 8)
            if seed >= 0:
                found[form].append(taken)
    medians = {
        form: {
            "seconds": round(statistics.median(seconds for seconds, _ in runs), 4),
            "step_ms": round(statistics.median(step for _, step in runs) * 1e3, 4),
            "all_seconds": [round(seconds, 4) for seconds, _ in runs],
        }
        for form, runs in found.items()
    }
    base = medians[WITHOUT]
    for one in medians.values():
        for key in ("seconds", "step_ms"):
            one[f"{key}_ratio"] = round(one[key] / base[key], 4)
    return medians


def run(loop: EngineLoop, work: list[Work], names: list[str], output_tokens: int | None = None) -> tuple[float, float]:
    """Run the requests to their end, spread over these adapters; return all seconds, and the median of a decoding
    step."""
    loop.forget_past()
    began = time.perf_counter()
    for i, (prompt, count) in enumerate(work):
        params = SamplingParams(
            max_tokens=min(count, output_tokens or count), ignore_eos=True, detokenize=False, temperature=0
        )
        options = {NAME: encode((Part(names[i % len(names)]),))} if names else {}
        loop.add(GenerateRequest(id=f"{began}-{i}", tokens=prompt, params=params, options=options))
    ends, steps, produced = [time.perf_counter()], [], 0
    while loop.busy:
        count = 0
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            count += len(delta.tokens)
        produced += count
        ends.append(time.perf_counter())
        if loop.starved:
            time.sleep(1e-3)  # let the threads run that read adapters
        if count == len(work):
            steps.append(ends[-1] - ends[-2])
    expected = sum(min(count, output_tokens or count) for _, count in work)
    if produced != expected:
        raise RuntimeError(f"{produced} tokens came, not {expected}")
    return ends[-1] - began, statistics.median(steps or [0.0])


if __name__ == "__main__":
    main()
