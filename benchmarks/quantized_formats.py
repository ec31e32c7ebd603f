"""Speed, size and accuracy of one model in every quantized format that Octavo reads, on a CPU.

    python benchmarks/quantized_formats.py write --folder /tmp/formats
    python benchmarks/quantized_formats.py quality --folder /tmp/formats
    python benchmarks/quantized_formats.py speed --folder /tmp/formats --formats gptq-4 awq --workloads A D

`write` rounds the matrices of the layers to the nearest values of each format, with the writers of the tests
(`tests/quantized_kit.py`), so formats are compared without what calibration adds to each. Embeddings are left in
bfloat16. `gguf:NAME` is the file of that name in the folder; "bfloat16" is the model that the others were made from;
`NAME+head` is a format with `--head-dtype int8`.

On a machine that others use, `--processor` counts processor seconds in place of those of the clock, with `--threads 1`.

`quality` compares each with the original (perplexity, divergence), and its greedy answers with those of the same
matrices expanded to bfloat16. `speed` runs workloads of `cpu_workloads.py`; all engines take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cpu_workloads import RESULTS, WORKLOADS, Requests, limits
from machine import describe
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from quantized_kit import Example, awq, bnb, bnb_int8, fp8, gptq, hqq, int8, mx, nvfp4, packed_integers

from octavo import LLM, SamplingParams
from octavo.hub.resolve import resolve
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.registry import spec_of
from octavo.nn.weights import TensorSpec
from octavo.python_api.evaluate import TOP, bundled_text, read

GROUP = 64  # divides the widths of SmolLM2
FORMATS: dict[str, Example] = {
    **{f"gptq-{bits}": gptq(bits, GROUP) for bits in (2, 3, 4, 8)},
    "gptq-4-act-order": gptq(4, GROUP, act_order=True),
    "gptq-4-asymmetric": gptq(4, GROUP, symmetric=False),
    "awq": awq(GROUP, "gemm"),
    "w4a16": packed_integers(4, GROUP),
    "w8a16": packed_integers(8, GROUP),
    "w8a8": int8(),
    "bnb-int8": bnb_int8(),
    "bnb-nf4": bnb("nf4", nested=False),
    "bnb-fp4": bnb("fp4", nested=False),
    "hqq-4": hqq(4, GROUP),
    "hqq-8": hqq(8, GROUP),
    "fp8-tensor": fp8("tensor"),
    "fp8-channel": fp8("channel"),
    "fp8-tiles": fp8("tiles"),
    "fp8-e5m2": fp8("channel", torch.float8_e5m2),
    "nvfp4": nvfp4("compressed-tensors"),
    "mxfp4": mx(4),
    "mxfp8": mx(8),
}
PROMPTS = ("The capital of France is", "A river begins", "def fibonacci(n):", "To bake bread, first")


def write(source: str, folder: Path, names: list[str]) -> None:
    """Write the checkpoints that are not there, and "bfloat16"."""
    files = resolve(source)
    checkpoint = arranged(open_checkpoint(files), spec_of(files.config))
    shapes = {name: checkpoint.shape(name) or () for name in sorted(checkpoint.names())}
    for name in ["bfloat16", *names]:
        to, stored = folder / name, {}
        if to.exists() or name.startswith("gguf:") or name.endswith("+head"):
            continue
        torch.manual_seed(0)
        for key, shape in shapes.items():
            tensor = checkpoint.tensor(key, TensorSpec(shape, torch.bfloat16)).to(torch.bfloat16)
            if name == "bfloat16" or len(shape) != 2 or "embed" in key:
                stored[key] = tensor.contiguous()
                continue
            parts, _ = FORMATS[name].write(tensor.float())
            stored |= {f"{key.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in parts.items()}
        settings = {} if name == "bfloat16" else {"quantization_config": FORMATS[name].settings}
        to.mkdir(parents=True)
        (to / "config.json").write_text(json.dumps({**files.config, "dtype": "bfloat16", **settings}))
        save_file(stored, to / "model.safetensors")
        print(name, "written", flush=True)


def opened(folder: Path, name: str, source: str, *, threads: int = 2, **settings: Any) -> LLM:
    path = folder / name.removeprefix("gguf:").removesuffix("+head")
    own = {"kv_cache_memory_bytes": 1 << 30, "threads": threads, "tokenizer": str(resolve(source).path)}
    head = {"head_dtype": "int8"} if name.endswith("+head") else {}
    if name == "bfloat16":
        settings = {"dtype": "bfloat16", **settings}
    return LLM(str(path), **own, **head, **settings)


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]


def quality(folder: Path, names: list[str], source: str) -> dict[str, Any]:
    text, found = bundled_text(), {}
    with opened(folder, "bfloat16", source, dtype="float32", max_logprobs=TOP) as llm:
        reference = read(llm, text)
    for name in ["bfloat16", *names]:
        with opened(folder, name, source, max_logprobs=TOP) as llm:
            reading, own = read(llm, text), answers(llm)
            form, size = llm.info.weights, llm.info.memory["weights"]
        with opened(folder, name.removesuffix("+head"), source, dtype="float32") as llm:
            same = sum(mine == its for mine, its in zip(own, answers(llm), strict=True))
        found[name] = {
            "mb": round(size / 1e6, 1),
            "form": form,
            "perplexity": round(reading.perplexity, 3),
            "divergence": round(reading.divergence(reference), 5),
            "same_answers": f"{same}/{len(own)}",
        }
        print(name, json.dumps(found[name]), flush=True)
    return found


def rate(workload: str, llm: LLM, requests: Requests, *, processor: bool) -> float:
    """Tokens per second of the clock, or of processor time."""
    began, began_processor = time.perf_counter(), time.process_time()
    found = WORKLOADS[workload](llm, requests)
    if not processor:
        return found
    return found * (time.perf_counter() - began) / (time.process_time() - began_processor)


def speed(folder: Path, names: list[str], source: str, args: argparse.Namespace) -> dict[str, Any]:
    engines = {name: opened(folder, name, source, threads=args.threads) for name in names}
    requests = Requests(0, next(iter(engines.values())).info.vocab_size)
    runs: dict[str, dict[str, list[float]]] = {w: {name: [] for name in names} for w in args.workloads}
    for _ in range(args.rounds):
        for workload in args.workloads:
            for name, llm in engines.items():
                runs[workload][name].append(round(rate(workload, llm, requests, processor=args.processor), 1))
            print(workload, {name: values[-1] for name, values in runs[workload].items()}, flush=True)
    for llm in engines.values():
        llm.close()
    medians = {w: {name: statistics.median(values) for name, values in of.items()} for w, of in runs.items()}
    print(json.dumps(medians, indent=1))
    return {"runs": runs, "medians": medians}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("write", "quality", "speed"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["A", "B", "C", "D"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor", action="store_true", help="tokens per second of processor time (speed)")
    parser.add_argument("--output", type=Path, help="default: a new part of benchmarks/results/quantized_formats.json")
    args = parser.parse_args()
    if args.task == "write":
        write(args.model, args.folder, args.formats)
        return 0
    result: dict[str, Any] = {**describe(), "command": sys.argv[1:]}
    if args.task == "quality":
        result |= {"formats": quality(args.folder, args.formats, args.model)}
    else:
        result |= {"limits": limits(args.threads), **speed(args.folder, args.formats, args.model, args)}
    output = args.output or RESULTS / "quantized_formats.json"
    parts = json.loads(output.read_text()) if output.exists() else {}
    output.write_text(json.dumps({**parts, args.task: result}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
