"""What LoRA adapters cost on one device: steps of 256 streams and of one, on Llama 3.1 8B's shape with random weights.

    python benchmarks/lora_decode.py [--adapters 1 8 64] [--context 384] [--tokens 64] [--rounds 3] [--output FILE]

One engine with LoRA runs all numbers of adapters in turns, since the clocks of a GPU drift; then an engine without LoRA
and the first one without adapters do. All adapters have the same rank and change all linear layers; requests are spread
over those in use. Every round has the same prompts, so that later rounds find them in the prefix cache. Step times are
medians of the steps in which all requests decode; a ratio is the median of the rounds' ratios. The file is written
after each round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import files_of
from machine import Report, describe, describe_gpu
from safetensors.torch import save_file

from octavo.build import build_core
from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode

HERE = Path(__file__).parent
DISABLED, UNUSED = "LoRA disabled", "no adapter in use"
STREAMS = {"decode": 256, "single": 1}


@dataclass
class Form:
    """An engine, and the adapters over which the requests are spread."""

    loop: EngineLoop
    names: Sequence[str] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--workloads", nargs="+", default=list(STREAMS), choices=list(STREAMS))
    parser.add_argument("--streams", type=int, default=STREAMS["decode"], help="of decode")
    parser.add_argument("--context", type=int, default=384, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=float, default=64, help="KV cache of the engine with LoRA")
    parser.add_argument("--plain-kv-gib", type=float, default=20, help="KV cache of the engine without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    report = Report(describe() | {"gpu": describe_gpu(), "rank": args.rank, "context": args.context}, args.output)
    names = [f"adapter{i}" for i in range(max(args.adapters))]
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((args.model / "config.json").read_text())
        save_adapter(Path(folder), config, args.rank)
        modules = tuple(f"{name}={folder}" for name in names)
        enabled = built(args, args.kv_gib, report, "with LoRA", lora_modules=modules, max_loras=len(names))
        began = time.perf_counter()
        count = max(args.streams, len(names))
        run(Form(enabled, names), prompts_of(config, count, 16), 2)
        report.note("first_use_s", round(time.perf_counter() - began, 2))
        for name in args.workloads:
            streams = args.streams if name == "decode" else 1
            forms = {UNUSED: Form(enabled)}
            forms |= {f"{used} in use": Form(enabled, names[:used]) for used in args.adapters if used <= streams}
            compare(report, name, forms, prompts_of(config, streams, args.context), args)
        disabled = built(args, args.plain_kv_gib, report, "without LoRA")
        for name in args.workloads:
            streams = args.streams if name == "decode" else 1
            pair = {DISABLED: Form(disabled), UNUSED: Form(enabled)}
            compare(report, f"{name}, enabled", pair, prompts_of(config, streams, args.context), args)


def built(args: argparse.Namespace, kv_gib: float, report: Report, title: str, **settings: Any) -> EngineLoop:
    """Return an engine."""
    config = EngineConfig.of(
        load_format="dummy",
        device=args.device,
        max_num_seqs=args.streams,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        memory_bytes=int(kv_gib * 2**30),
        **settings,
    )
    began = time.perf_counter()
    loop, info = build_core(config, files_of(args.model))
    report.note(f"start {title}", {"seconds": round(time.perf_counter() - began, 2), "phases": info.phases})
    return loop


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


def prompts_of(config: dict[str, Any], count: int, length: int) -> list[list[int]]:
    drawn = random.Random(0)
    return [[drawn.randrange(config["vocab_size"]) for _ in range(length)] for _ in range(count)]


def compare(
    report: Report, name: str, forms: Mapping[str, Form], prompts: list[list[int]], args: argparse.Namespace
) -> None:
    """Run all forms in turns, once without counting it; report milliseconds a step, and ratios to the first form."""
    found: dict[str, list[float]] = {form: [] for form in forms}
    base = next(iter(forms))
    for number in range(-1, args.rounds):
        for form, one in forms.items():
            taken = run(one, prompts, args.tokens if number >= 0 else 4)
            if number >= 0:
                found[form].append(taken)
        if number >= 0:
            report.note(name, {form: summary(steps, found[base]) for form, steps in found.items()})


def summary(steps: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    ratio = statistics.median(one / other for one, other in zip(steps, base, strict=True))
    each = [round(step * 1e3, 3) for step in steps]
    return {"step_ms": statistics.median(each), "ratio": round(ratio, 4), "rounds_ms": each}


def run(form: Form, prompts: list[list[int]], tokens: int) -> float:
    """Run requests to their end; return the median seconds of a step in which all of them decode."""
    loop, names = form.loop, form.names
    loop.forget_past()
    began = time.perf_counter()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
    for i, prompt in enumerate(prompts):
        options = {NAME: encode((Part(names[i % len(names)]),))} if names else {}
        loop.add(GenerateRequest(id=f"{began}-{i}", tokens=prompt, params=params, options=options))
    last, steps, produced = time.perf_counter(), [], 0
    while loop.busy:
        count = 0
        for delta in loop.step():
            if delta.error:
                raise RuntimeError(delta.error)
            count += len(delta.tokens)
        produced += count
        before, last = last, time.perf_counter()
        if loop.starved:
            time.sleep(1e-3)  # let the threads run that read adapters
        if count == len(prompts):
            steps.append(last - before)
    if produced != tokens * len(prompts):
        raise RuntimeError(f"{produced} tokens came, not {tokens * len(prompts)}")
    return statistics.median(steps or [0.0])


if __name__ == "__main__":
    main()
