"""Rate of reading safetensors into a model, beside that of reading the same files, and the host's peak memory.

    python benchmarks/load_speed.py --gib 2 --shards 4
    python benchmarks/load_speed.py --gib 16 --shards 4 --device cuda

Writes a Llama of random bfloat16 weights into a temporary folder, and reads the files once, so that they are in the
page cache. Then, in a process of its own for each round: a copy of all tensors from the files, one after another, which
is the page cache's bandwidth to the device; and the weights of a worker, as an engine loads them. `reading` is the
loader alone, `phase` what a start reports, which begins to compile kernels before. Memory that files are mapped to
belongs to the page cache: what loading takes besides is anonymous, and read off every few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, VOCAB = 2048, 5632, 32, 32000
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
POOL = VOCAB * HIDDEN + (1 << 20)
"""Random numbers, from which each tensor copies a slice."""


def write(folder: Path, gib: float, shards: int) -> int:
    """Write a checkpoint of about this size; return its bytes."""
    layers = max(shards, round(gib * (1 << 29) / LAYER))
    torch.manual_seed(0)
    pool = torch.randn(POOL, dtype=torch.bfloat16) * 0.02  # drawing each tensor would take minutes
    ends = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for shard in range(shards):
        shapes = dict(ends) if shard == 0 else {}
        for layer in range(layers * shard // shards, layers * (shard + 1) // shards):
            at = f"model.layers.{layer}."
            shapes |= {f"{at}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
            shapes |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
            shapes |= {f"{at}mlp.down_proj.weight": (HIDDEN, INNER)}
            shapes |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        tensors = {}
        for name, shape in shapes.items():
            size = math.prod(shape)
            start = int(torch.randint(POOL - size + 1, ()))
            tensors[name] = pool[start : start + size].reshape(shape).clone()  # safetensors writes no views
        save_file(tensors, folder / f"model-{shard}.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copied(folder: Path, device: str) -> float:
    """Return the seconds of a copy of all tensors."""
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                file.get_tensor(name).to(device, copy=True)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


class PeakAnonymous:
    """The most anonymous memory that the process has within a `with` block, beyond what it had before."""

    def __init__(self) -> None:
        self._before = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def nbytes(self) -> int:
        return self._most - self._before

    def __enter__(self) -> PeakAnonymous:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def loaded(folder: Path, device: str) -> dict[str, float]:
    """Return the seconds of reading, and of the weights' phase of a start, and by how much the peak memory exceeds that
    before."""
    from octavo import LLM
    from octavo.worker import worker

    load, reading = worker.load_weights, [0.0]

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        report = load(*args, **options)
        if device != "cpu":
            torch.cuda.synchronize()
        reading[0] += time.perf_counter() - began
        return report

    worker.load_weights = timed
    torch.zeros(1, device=device)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26, "device": device}
    with PeakAnonymous() as anonymous, LLM(str(folder), **settings, enforce_eager=True, self_check=False) as llm:
        phase, weights, cache = llm.info.phases["weights"], llm.info.memory["weights"], llm.info.memory["kv_cache"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "reading": reading[0],
        "phase": phase,
        "peak_bytes": (peak - before) * 1024,
        "weights": weights,
        "anonymous_bytes": anonymous.nbytes,
        "cache": cache,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--round", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.round is not None:
        print(json.dumps({"copy": copied(args.round, args.device), **loaded(args.round, args.device)}))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder, args.gib, args.shards)
        for path in folder.glob("*.safetensors"):
            path.read_bytes()
        command = [sys.executable, __file__, "--round", name, "--device", args.device]
        rounds = [json.loads(subprocess.check_output(command).splitlines()[-1]) for _ in range(args.rounds)]
    copy, load, phase = (statistics.median(one[key] for one in rounds) for key in ("copy", "reading", "phase"))
    result = {
        "gb": round(size / 1e9, 2),
        "shards": args.shards,
        "copy_gb_s": round(size / copy / 1e9, 2),
        "load_gb_s": round(size / load / 1e9, 2),
        "phase_gb_s": round(size / phase / 1e9, 2),
        "rounds": rounds,
    }
    print(json.dumps({**describe(), "command": sys.argv[1:], **result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
