"""What several GPUs of one machine give: sums over ranks, throughput of each division, times of starts, bytes read.

    python benchmarks/parallel_gpu.py --output FILE [--minutes 10] [--only NAME ...] [--list]

Each section below is a process of its own, so that one that fails or hangs costs only its own figures; FILE is written
after each. Sections that need more GPUs than there are, or for which no time is left, are listed in it. Random weights
of real models' shapes, greedy, ends of sequence ignored, requests handed over at once, a scaled-down warm-up before
each workload. `start_s` counts from the exec of the section's process until the engine is ready. A cold start has empty
caches of kernels, a warm one those of the cold one.

`--trial` runs everything with tiny shapes on the CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import describe, describe_gpu, seconds_since_exec

HERE = Path(__file__).resolve().parent
EIGHT, SEVENTY, MIXTURE = "llama-3.1-8b", "llama-3.1-70b", "qwen3-235b-a22b"
LATENT = "deepseek-v2-lite"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
TINY |= {"num_key_value_heads": 8, "vocab_size": 4096, "head_dim": 16, "max_position_embeddings": 4096}
TINY_EXPERTS = TINY | {"num_experts": 8, "moe_intermediate_size": 32}
TINY_LATENT = TINY | {"n_routed_experts": 8, "moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
TINY_LATENT |= {"qk_nope_head_dim": 16, "v_head_dim": 16}


@dataclass(frozen=True, slots=True)
class Section:
    """One process of the benchmark.

    Attributes:
        run: called with the section in its process; returns figures.
        most_s: seconds after which the process is ended.
        settings: of the engine, beside those that all have.
        work: names of workloads; a number after a colon is their scale.
        caches: sections with the same name share caches of kernels.
        logs: keep the log of the start, with the times of its parts in each rank.
    """

    name: str
    gpus: int
    run: Callable[[Section, argparse.Namespace], dict[str, Any]]
    most_s: int
    model: str = EIGHT
    settings: Mapping[str, Any] = field(default_factory=dict)
    work: tuple[str, ...] = ()
    caches: str = "shared"
    logs: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("parallel_gpu.json"))
    parser.add_argument("--minutes", type=float, default=10.0, help="sections that might take longer are left out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="sections whose names contain one of these")
    parser.add_argument("--trial", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--list", action="store_true", help="print the names of the sections")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sections = {section.name: section for section in SECTIONS}
    if args.list:
        print("\n".join(f"{one.name}: {one.gpus} GPUs, at most {one.most_s} s" for one in SECTIONS))
        return
    if args.section:
        print("RESULT " + json.dumps(sections[args.section].run(sections[args.section], args)), flush=True)
        return
    run_all(args)


def run_all(args: argparse.Namespace) -> None:
    ends, gpus = time.monotonic() + 60 * args.minutes, 8 if args.trial else count_gpus()
    report: dict[str, Any] = {"machine": describe(), "gpu": describe_gpu(), "gpus": gpus, "trial": args.trial}
    report |= {"topology": topology(), "sections": {}, "left_out": {}}
    caches = Path(tempfile.mkdtemp(prefix="parallel-gpu-"))
    try:
        for section in SECTIONS:
            if args.only and not any(part in section.name for part in args.only):
                continue
            left = ends - time.monotonic()
            if section.gpus > gpus:
                report["left_out"][section.name] = f"needs {section.gpus} GPUs"
            elif left < 0.5 * section.most_s:
                report["left_out"][section.name] = f"{left:.0f} s were left, and it takes up to {section.most_s}"
            else:
                began = time.monotonic()
                limit_s = min(left, section.most_s * (4 if args.trial else 1))
                found = run_section(section, args, caches / section.caches, limit_s)
                report["sections"][section.name] = found | {"took_s": round(time.monotonic() - began, 1)}
                print(section.name, json.dumps(report["sections"][section.name]), flush=True)
            args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(caches, ignore_errors=True)
    print("left out:", json.dumps(report["left_out"]), flush=True)


def run_section(section: Section, args: argparse.Namespace, caches: Path, limit_s: float) -> dict[str, Any]:
    """Return the figures of a section, or why there are none."""
    command = [sys.executable, str(Path(__file__).resolve()), "--section", section.name]
    command += ["--trial"] if args.trial else []
    own = {"OCTAVO_KERNEL_CACHE": str(caches / "octavo"), "TRITON_CACHE_DIR": str(caches / "triton")}
    # On a CPU, compiling the C++ kernels anew each time would be all that a trial does.
    environment = os.environ | ({} if args.trial else own)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # ranks end with the engine
        out, errors = process.communicate()
        return {"error": f"no result within {limit_s:.0f} s", "log": errors[-1500:]}
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}", "log": errors[-1500:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found | ({"log": errors.splitlines()} if section.logs else {})


def count_gpus() -> int:
    stated = os.environ.get("CUDA_VISIBLE_DEVICES")
    if stated is not None:
        return len([name for name in stated.split(",") if name.strip()])
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return found.count("GPU ")


def topology() -> str:
    """Return how the GPUs are linked, as the driver says it; empty without a driver."""
    try:
        return subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout[:2000]
    except OSError:
        return ""


# Engines


def files_of(section: Section, args: argparse.Namespace) -> Any:
    from octavo.hub.files import ModelFiles

    folder = HERE / "models" / section.model
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if args.trial:
        config |= TINY_EXPERTS if "num_experts" in config else TINY_LATENT if "kv_lora_rank" in config else TINY
    return ModelFiles(name=folder.name, path=folder, format="safetensors", weights=(), config=config)


def settings_of(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    common: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 1024, "scheduling_policy": "longest-first"}
    if args.trial:
        cpu = {"device": "cpu", "cpu_bind": "nobind", "threads": 1, "memory_bytes": 1 << 26, "dtype": "float32"}
        if section.settings.get("enable_dbo"):
            cpu["attention_backend"] = "torch"  # native programs don't compute steps in parts
        return common | {"max_model_len": 2304, "max_num_seqs": 64, **cpu} | dict(section.settings)
    return common | {"device": "cuda", "max_model_len": 16384, "max_num_batched_tokens": 8192} | dict(section.settings)


def work_of(name: str, args: argparse.Namespace, *, seed: int, warm: bool = False) -> list[Any]:
    from octavo.bench.workloads import workload

    name, _, scale = name.partition(":")
    scaled = float(scale or 1) * (0.1 if warm else 1.0) * (0.01 if args.trial else 1.0)
    if not args.trial:
        return workload(name, seed=seed, scale=scaled)
    tiny = workload(name, seed=seed, scale=scaled, vocab_size=4096)
    return [work._replace(output_tokens=min(work.output_tokens, 6)) for work in tiny]


def run_engine(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine and run each workload once, after a scaled-down warm-up."""
    import gc

    from octavo.build import build_core
    from octavo.config import EngineConfig

    if section.logs:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%M:%S")
    imported_s = round(seconds_since_exec(), 2)
    loop, info = build_core(EngineConfig.of(**settings_of(section, args)), files_of(section, args))
    found: dict[str, Any] = {"start_s": round(seconds_since_exec(), 2), "before_s": imported_s}
    found["phases_s"] = info.phases
    gc.collect()
    gc.freeze()
    from gpu_workloads import measure  # imports torch, which the engine does only once the ranks have started

    found |= {"device": info.device, "settings": dict(section.settings), "kv_blocks": info.num_blocks}
    found |= {"weight_gib": round(info.memory["weights"] / 2**30, 2)}
    for name in section.work:
        measure(loop, work_of(name, args, seed=-1, warm=True), False)
        found[name] = measure(loop, work_of(name, args, seed=0), False)
        print(section.name, name, json.dumps(found[name]), file=sys.stderr, flush=True)
    loop.close()
    return found


def run_served(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """As `run_engine`, with the engine in its own process, or several replicas, behind `AsyncLLM`."""
    import asyncio

    from octavo import AsyncLLM
    from octavo.core.params import RequestOutputKind, SamplingParams

    folder = Path(tempfile.mkdtemp(prefix="model-"))
    (folder / "config.json").write_text(json.dumps(files_of(section, args).config), encoding="utf-8")

    async def finish(llm: AsyncLLM, work: list[Any], name: str) -> dict[str, Any]:
        async def one(number: int, prompt: list[int], count: int) -> int:
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            given: Any = {"prompt_token_ids": prompt}
            found = [output async for output in llm.generate(given, params, request_id=f"{name}-{number}")]
            return len(found[-1].outputs[0].token_ids)

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(i, prompt, count) for i, (prompt, count) in enumerate(work)))
        seconds = time.perf_counter() - began
        return {"requests": len(work), "seconds": round(seconds, 4), "output_tok_s": round(sum(counts) / seconds, 1)}

    async def run() -> dict[str, Any]:
        asked = settings_of(section, args) | {"model": str(folder), "skip_tokenizer_init": True}
        async with await AsyncLLM.start(**asked) as llm:
            found: dict[str, Any] = {"start_s": round(seconds_since_exec(), 2), "settings": dict(section.settings)}
            for name in section.work:
                await finish(llm, work_of(name, args, seed=-1, warm=True), f"warm-{name}")
                found[name] = await finish(llm, work_of(name, args, seed=0), name)
            return found

    try:
        return asyncio.run(run())
    finally:
        shutil.rmtree(folder)


def run_reading(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Load a checkpoint of few layers from safetensors; count what each rank's process reads from the disk."""
    import torch
    from safetensors.torch import save_file

    from octavo.build import build_core
    from octavo.config import EngineConfig
    from octavo.hub.files import ModelFiles
    from octavo.models.load.weights import weight_layers
    from octavo.models.registry import build_model, spec_of
    from octavo.nn.attention.reference import ReferenceAttention

    config = files_of(section, args).config | {"num_hidden_layers": 2}
    cpu, attention = torch.device("cpu"), ReferenceAttention()
    shapes = build_model(spec_of(config), dtype=torch.bfloat16, device=cpu, attention=attention)
    wanted = [want for layer in weight_layers(shapes) for want in layer.wanted()]
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir="."))
    try:
        path = folder / "model.safetensors"
        save_file({want.name: repeated_noise(want.spec.shape, want.spec.dtype) for want in wanted}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        print(f"wrote {path.stat().st_size} bytes after {seconds_since_exec():.1f} s", file=sys.stderr, flush=True)
        files = ModelFiles(name="few layers", path=folder, format="safetensors", weights=(path,), config=config)
        asked = settings_of(section, args) | {"load_format": "auto"}
        loop, info = build_core(EngineConfig.of(**asked), files)
        pids = [process.pid for process in loop.worker.ranks.processes]  # type: ignore[attr-defined]
        found = {"file_bytes": path.stat().st_size, "phases_s": info.phases}
        found |= {"read_from_disk": [read_bytes(pid) for pid in pids], "memory": info.memory}
        loop.close()
    finally:
        shutil.rmtree(folder)
    return found


def repeated_noise(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a tensor that repeats one block of noise: torch draws with one thread, 150 million numbers a second."""
    import torch

    made = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(min(made.numel(), 1 << 20), dtype=dtype).normal_(generator=generator)
    for part in made.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
    return made


def read_bytes(pid: int) -> int:
    """Return the bytes that a process has had read from the disk (proc(5)); memory that the system cached is not
    counted."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def run_sums(section: Section, args: argparse.Namespace) -> dict[str, Any]:
    """Sums over ranks in graphs; see `parallel_sums.py`."""
    from parallel_sums import measure_sums

    return measure_sums(section.gpus, trial=args.trial)


REPLICAS_2 = {"data_parallel_size": 2}
TWO, FOUR, EIGHT_GPUS = ({"tensor_parallel_size": size} for size in (2, 4, 8))
STAGES = {"pipeline_parallel_size": 2}
PROMPTS_2, PROMPTS_4 = ({"prefill_context_parallel_size": size} for size in (2, 4))
ALL = ("single", "decode", "prefill")
WHOLE = {"enable_expert_parallel": True}
REQUESTS_2, REQUESTS_8 = ({"data_parallel_size": size} | WHOLE for size in (2, 8))
SENT = {"all2all_backend": "all_to_all"}
SECTIONS = [
    Section("sums over 2 ranks", 2, run_sums, 60),
    Section("8B TP 2", 2, run_engine, 90, EIGHT, TWO, (*ALL, "chat", "decode:2")),
    Section("8B TP 2, parts", 2, run_engine, 75, EIGHT, TWO | {"enable_dbo": True}, ("prefill", "chat")),
    Section("70B TP 2, cold", 2, run_engine, 150, SEVENTY, TWO, ALL, caches="70B"),
    Section("70B TP 2, warm", 2, run_engine, 60, SEVENTY, TWO, (), caches="70B"),
    Section("70B TP 2, start, cold", 2, run_engine, 75, SEVENTY, TWO, (), caches="70B start", logs=True),
    Section("70B TP 2, start, warm", 2, run_engine, 45, SEVENTY, TWO, (), caches="70B start", logs=True),
    Section("8B PP 2", 2, run_engine, 75, EIGHT, STAGES, ("decode:2", "prefill")),
    Section("8B one GPU", 1, run_engine, 75, EIGHT, {}, ("prefill", "prefill:0.016", "single")),
    Section("8B prompts over 2", 2, run_engine, 75, EIGHT, PROMPTS_2, ("prefill", "prefill:0.016", "single")),
    Section("8B one GPU, served", 1, run_served, 50, EIGHT, {}, ("chat",)),
    Section("8B DP 2, served", 2, run_served, 50, EIGHT, REPLICAS_2, ("chat",)),
    Section("8B one GPU, served, twice", 1, run_served, 75, EIGHT, {}, ("chat:2",)),
    Section("8B DP 2, served, twice", 2, run_served, 60, EIGHT, REPLICAS_2, ("chat:2",)),
    Section("V2-Lite EP 2", 2, run_engine, 75, LATENT, TWO | WHOLE, ALL),
    Section("V2-Lite DP 2 with EP", 2, run_engine, 100, LATENT, REQUESTS_2, ALL),
    Section("V2-Lite DP 2 with EP, rows", 2, run_engine, 75, LATENT, REQUESTS_2 | SENT, ALL),
    Section("bytes read by 2 ranks", 2, run_reading, 60, EIGHT, TWO | {"enforce_eager": True}),
    Section("sums over 4 ranks", 4, run_sums, 60),
    Section("70B TP 4", 4, run_engine, 120, SEVENTY, FOUR, ALL),
    Section("8B prompts over 4", 4, run_engine, 75, EIGHT, PROMPTS_4, ("prefill", "prefill:0.016")),
    Section("sums over 8 ranks", 8, run_sums, 60),
    Section("70B TP 8", 8, run_engine, 120, SEVENTY, EIGHT_GPUS, ALL),
    Section("235B-A22B TP 4", 4, run_engine, 150, MIXTURE, FOUR, ALL),
    Section("235B-A22B EP 4", 4, run_engine, 150, MIXTURE, FOUR | WHOLE, ALL),
    Section("235B-A22B TP 8", 8, run_engine, 120, MIXTURE, EIGHT_GPUS, ALL),
    Section("235B-A22B EP 8", 8, run_engine, 120, MIXTURE, EIGHT_GPUS | WHOLE, ALL),
    Section("235B-A22B DP 8 with EP", 8, run_engine, 120, MIXTURE, REQUESTS_8, ALL),
]

if __name__ == "__main__":
    main()
