"""Time to read an adapter from the page cache into host memory, laid out as pages.

    python benchmarks/adapter_reading.py [--rank 16] [--repeat 10]

The adapter changes all linear layers of a model of the 8B shape (32 layers, hidden size 4096); its numbers are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.core.errors import UnsupportedError
from octavo.features.lora.checks import read_adapter
from octavo.features.lora.layout import Geometry, Target, TargetPart
from octavo.features.lora.payload import Reading, Source
from octavo.features.lora.reader import Reader
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


def save(folder: Path, every: tuple[Target, ...], rank: int) -> None:
    """Write an adapter of this rank on all targets."""
    tensors = {}
    for target in every:
        for part in target.parts:
            path = f"base_model.model.{target.path}.{part.name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, part.inputs).bfloat16()
            tensors[f"{path}.lora_B.weight"] = torch.randn(part.outputs, rank).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def no_gains(*_: object) -> torch.Tensor:
    raise UnsupportedError("this adapter has no magnitudes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    given = parser.parse_args()
    every = targets()
    reader = Reader(
        Targets(
            every,
            (torch.nn.Identity(),) * len(every),
            tuple((Cut(),) * len(one.parts) for one in every),
            tuple((None,) * len(one.parts) for one in every),
        ),
        BLOCK,
        torch.bfloat16,
        no_gains,
    )
    checks, reads = [], []
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), every, given.rank)
        for uid in range(given.repeat):
            began = time.perf_counter()
            file = read_adapter(Path(folder), every, 256)
            checked = time.perf_counter()
            _, pages = reader.read(Reading(uid, (Source(folder, file.manifest),), file.manifest))
            checks.append(checked - began)
            reads.append(time.perf_counter() - checked)
    size = pages.nbytes / 1e6
    for name, times in (("check", checks), ("check and read", reads)):
        print(f"{name}: median {statistics.median(times) * 1e3:.1f} ms, least {min(times) * 1e3:.1f} ms")
    print(f"rank {given.rank}: {len(file.manifest.pieces)} pieces, {size:.1f} MB, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
