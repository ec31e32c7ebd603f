"""Time to read an adapter from the page cache into host memory, laid out as pages.

    python benchmarks/adapter_reading.py [--rank 16] [--repeat 10] [--threads 4] [--form rank|output]
        [--dtype bfloat16|float32] [--output figures.json]

The adapter changes all linear layers of a model of the 8B shape (32 layers, hidden size 4096); its numbers are random.
Measured in turns: checking its files, checking them when one alike was checked before, reading with a second check (as
when they have changed), reading without, reading without in several threads (as on a GPU's machine), and copying as
many bytes into new memory and into memory in use.
Processor time is that of the calling thread. The form is that of B in pages: by rank, as for CPUs, or by output, as for
GPUs. The dtype is the file's; pages are bfloat16. Loads of a server with a GPU: cold_adapters.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from octavo.core.errors import UnsupportedError
from octavo.engine.process import switch_threads_often
from octavo.features.lora.checks import Checker, read_adapter
from octavo.features.lora.layout import Geometry, Target, TargetPart
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.reader import HELPERS, Reader
from octavo.features.lora.targets import Targets
from octavo.nn.shard import Cut

LAYERS, HIDDEN, INNER, KEYS = 32, 4096, 14336, 1024
BLOCK = Geometry(LAYERS, 2 * KEYS * 16 * 2, 2)
"""Blocks of 16 tokens in bfloat16."""


def targets() -> tuple[Target, ...]:
    """Return the layers of a model of this shape."""
    found = []
    for layer in range(LAYERS):
        for path, parts in (
            ("self_attn", [("q_proj", HIDDEN, HIDDEN), ("k_proj", HIDDEN, KEYS), ("v_proj", HIDDEN, KEYS)]),
            ("self_attn", [("o_proj", HIDDEN, HIDDEN)]),
            ("mlp", [("gate_proj", HIDDEN, INNER), ("up_proj", HIDDEN, INNER)]),
            ("mlp", [("down_proj", INNER, HIDDEN)]),
        ):
            made = tuple(TargetPart(name, i, o, i, o) for name, i, o in parts)
            found.append(Target(f"model.layers.{layer}.{path}", made))
    return tuple(found)


def save(folder: Path, every: tuple[Target, ...], rank: int, dtype: torch.dtype) -> None:
    """Write an adapter of this rank on all targets."""
    tensors = {}
    for target in every:
        for part in target.parts:
            path = f"base_model.model.{target.path}.{part.name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, part.inputs).to(dtype)
            tensors[f"{path}.lora_B.weight"] = torch.randn(part.outputs, rank).to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def no_gains(*_: object) -> torch.Tensor:
    raise UnsupportedError("this adapter has no magnitudes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--threads", type=int, default=HELPERS)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--form", choices=["rank", "output"], default="rank")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    switch_threads_often()  # as an engine core does
    every = targets()
    reader = Reader(
        Targets(
            every,
            (torch.nn.Identity(),) * len(every),
            tuple((Cut(),) * len(one.parts) for one in every),
            tuple((None,) * len(one.parts) for one in every),
        ),
        dataclasses.replace(BLOCK, by_output=given.form == "output"),
        torch.bfloat16,
        no_gains,
    )
    times: dict[str, list[tuple[float, float]]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began, used = time.perf_counter(), time.thread_time()
        result = work()
        times.setdefault(name, []).append((time.perf_counter() - began, time.thread_time() - used))
        return result

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.threads) as helpers:
        save(Path(folder), every, given.rank, getattr(torch, given.dtype))
        together = dataclasses.replace(reader, helpers=helpers)
        checker = Checker(every, 256)
        checker.read(Path(folder))
        for uid in range(given.repeat):
            file = timed("check", partial(read_adapter, Path(folder), every, 256))
            timed("check, one alike was checked", partial(checker.read, Path(folder)))
            again = Reading(uid, (Source(folder, file.manifest),), file.manifest)
            once = Reading(uid, (Source(folder, file.manifest, file=file.packed()),), file.manifest)
            timed("read, with a second check", partial(reader.read, again))
            _, pages, _ = timed("read", partial(reader.read, once))
            timed(f"read in {given.threads} threads", partial(together.read, once))
            into = torch.empty_like(pages).numpy()
            timed("copy into new memory", partial(np.copyto, into, pages.numpy()))
            timed("copy", partial(np.copyto, into, pages.numpy()))
    figures = {
        name: {
            "median_ms": round(statistics.median(wall for wall, _ in found) * 1e3, 1),
            "least_ms": round(min(wall for wall, _ in found) * 1e3, 1),
            "median_processor_ms": round(statistics.median(used for _, used in found) * 1e3, 1),
        }
        for name, found in times.items()
    }
    for name, one in figures.items():
        print(name, *(f"{key} {value}" for key, value in one.items()), sep=", ")
    size = round(pages.nbytes / 1e6, 1)
    print(f"rank {given.rank}: {len(file.manifest.pieces)} pieces, {size} MB, B by {given.form}, {given.dtype}")
    if given.output is not None:
        told = {
            "command": " ".join(["python", *sys.argv]),
            "rank": given.rank,
            "form": given.form,
            "dtype": given.dtype,
            "megabytes": size,
        }
        told |= {"machine": processor(), "torch": torch.__version__, "figures": figures}
        given.output.write_text(json.dumps(told, indent=1) + "\n")


def processor() -> str:
    """Return the processor's name and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
