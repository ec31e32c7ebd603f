"""Time to read an adapter from the page cache into host memory, laid out as pages.

    python benchmarks/adapter_reading.py [--rank 16] [--repeat 10] [--threads 4] [--form rank|output]
        [--dtype bfloat16|float32] [--output figures.json]

The adapter changes all linear layers of a model of the 8B shape (32 layers, hidden size 4096); its numbers are random.
Measured in turns: checking its files, checking them when one alike was checked before, reading with a second check (as
when they have changed), reading without, reading without in several threads (as on a GPU's machine), and copying as
many bytes into new memory and into memory in use.
Processor time is that of the calling thread. The form is that of B in pages: by rank, as for CPUs, or by output, as for
GPUs. The dtype is the file's; pages are bfloat16.

With `--form output`, it also measures a cold load, as on a server with a GPU but without copies to a device: the time
from the call that reads the adapter until it can be loaded ("cold, read"), and until its last page is in a room ("cold,
in rooms"). Progress is checked once per millisecond, as in an idle engine, or between simulated steps of `STEP_S`
("beside steps"). The main thread holds the GIL during the first `PLANNING_S` of each step.
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
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from octavo.core.errors import UnsupportedError
from octavo.core.output import TransferState
from octavo.core.plan import Transfer, Transfers
from octavo.device.transfer import HostCopier, HostCopy
from octavo.engine.process import switch_threads_often
from octavo.features.lora.checks import Checker, read_adapter
from octavo.features.lora.layout import Geometry, Target, TargetPart
from octavo.features.lora.payload import NAME, Reading, Source, page_names
from octavo.features.lora.reader import HELPERS, Reader
from octavo.features.lora.targets import Targets
from octavo.features.lora.worker import LoraWorker
from octavo.nn.shard import Cut
from octavo.worker.mover import Mover

LAYERS, HIDDEN, INNER, KEYS = 32, 4096, 14336, 1024
BLOCK = Geometry(LAYERS, 2 * KEYS * 16 * 2, 2)
"""Blocks of 16 tokens in bfloat16."""
POLL_S, PAUSE_S = 0.001, 0.2
STEP_S, PLANNING_S = 0.0055, 0.0025
"""Decodes of eight streams of an 8B model on an H200, and about what the host does for each."""


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


class Rooms(HostCopier):
    """Reserved rooms whose contents go nowhere."""

    def room(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.uint8)  # written, as pinned memory is

    def into(self, values: torch.Tensor, *_: object) -> HostCopy:
        return HostCopy(values)


class ColdLoads:
    """The worker half of a server on a GPU, without the GPU."""

    def __init__(self, reader: Reader) -> None:
        self.worker = LoraWorker(8, 64)
        self.worker._targets, self.worker._geometry, self.worker._reader = reader.targets, reader.geometry, reader
        self.worker._site = SimpleNamespace(device=SimpleNamespace(resident=True))  # type: ignore[assignment]
        blocks = SimpleNamespace(page_bytes=reader.geometry.block_bytes, scatter=no_gains)
        self.mover = Mover(blocks, SimpleNamespace(copier=Rooms), {NAME: self.worker})  # type: ignore[arg-type]

    def load(self, reading: Reading, num_blocks: int, *, steps: bool) -> tuple[float, float]:
        """Return the seconds until the adapter was read, and until it was in rooms."""
        self._steps = steps
        began = time.perf_counter()
        read = self.worker.call("read", msgspec.to_builtins(reading))
        while not read.done():
            self._pass_time()
        read.result()
        middle = time.perf_counter() - began
        transfer = Transfer(reading.uid, NAME, page_names(reading.uid, num_blocks), list(range(num_blocks)))
        self.mover.begin(Transfers(loads=[transfer]))
        while not (news := self.mover.take()):
            self._pass_time()
        whole = time.perf_counter() - began
        assert news[0].state is TransferState.ENDED
        assert not news[0].failed
        time.sleep(PAUSE_S)  # what goes on afterwards has time to end
        self.worker.call("drop", {"uid": reading.uid})
        return middle, whole

    def _pass_time(self) -> None:
        if not self._steps:
            time.sleep(POLL_S)
            return
        began = time.perf_counter()
        while time.perf_counter() < began + PLANNING_S / 2:
            pass
        self.mover.advance()
        while time.perf_counter() < began + PLANNING_S:
            pass
        time.sleep(STEP_S - PLANNING_S)


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
        cold = ColdLoads(together) if given.form == "output" else None
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
            if cold is not None:
                for beside in ("", " beside steps"):
                    read, whole = cold.load(once, len(pages), steps=bool(beside))
                    times.setdefault(f"cold{beside}, read", []).append((read, 0.0))
                    times.setdefault(f"cold{beside}, in rooms", []).append((whole, 0.0))
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
