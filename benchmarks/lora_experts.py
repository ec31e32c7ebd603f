"""Adapters of experts on one GPU: a layer's experts with additions to both products, beside the layer without any.

    python benchmarks/lora_experts.py [--tokens 1 16 256 2048 8192] [--adapters 1 8] [--rank 16] [--output FILE]

The shape is that of Qwen3-30B-A3B. Weights, routings and adapters of all experts are random, and tokens are spread over
adapters. Microseconds of a layer, recorded as CUDA graphs: `base` without adapters, `unfused` with the additions' form
of the products in a step that has no adapter, and with some adapters; `torch` computes one expert after another.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from gpu_experts import HERE, ROUTINGS, Layer, timed
from machine import describe, describe_gpu

from octavo.device.transfer import link_of
from octavo.features.lora.delta import Weights
from octavo.features.lora.experts import TorchExperts
from octavo.features.lora.gpu_experts import KernelExperts
from octavo.features.lora.layout import Geometry, Manifest, Piece, Target, TargetPart, layout
from octavo.features.lora.tables import RANKS, Batch, Tables
from octavo.models.feed_forwards.spec import ExpertsSpec
from octavo.models.registry import spec_of
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import expert_products as products
from octavo.nn.ops.experts import mix
from octavo.nn.ops.unfused_experts import mix_adding
from octavo.worker.blocks import Blocks

SLICES, SLICE_BYTES = 96, 16 * 512 * 2
"""Of a block with 16 tokens: keys and values of 48 layers."""
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


class Adapters:
    """Adapters of all experts of one layer, in a pool of blocks."""

    def __init__(self, form: ExpertsForm, count: int, rank: int) -> None:
        hidden, size = form.hidden_size, form.size
        first = Target("first", tuple(TargetPart(name, hidden, size, hidden, size) for name in ("gate", "up")))
        second = Target("second", (TargetPart("down", size, hidden, size, hidden),))
        targets = [first, second] * form.num_experts
        geometry = Geometry(SLICES, SLICE_BYTES, DTYPE.itemsize, by_output=True)
        pieces = [Piece(i, part, rank) for i, target in enumerate(targets) for part in range(len(target.parts))]
        placed = layout(targets, Manifest(tuple(pieces)), geometry)
        self.bytes = placed.num_tiles * geometry.tile_bytes
        blocks = np.random.default_rng(0).permutation(placed.num_blocks * count).reshape(count, -1)
        pool = torch.empty(SLICES, blocks.size, SLICE_BYTES // DTYPE.itemsize, dtype=DTYPE, device=DEVICE)
        pool.normal_(std=0.02)
        link = link_of(DEVICE)
        self.tables = Tables(targets, geometry, count, placed.num_blocks, link)
        for index in range(count):
            self.tables.enter(index, blocks[index].tolist(), placed)
        self.batch = Batch(16384, count, link, -(-rank // RANKS))
        self.kernels = KernelExperts(pool, self.tables, (first, second), 0, rank, self.batch)
        blocks_in_use = cast("Blocks", SimpleNamespace(memory=pool.view(torch.uint8)))  # all that is read of them
        weights = Weights(blocks_in_use, self.tables, DTYPE, link)
        places = {(i // 2, i % 2 == 1): (i, target) for i, target in enumerate(targets)}
        self.torch = TorchExperts(places, weights, self.batch)

    def assign(self, tokens: int, adapters: int) -> None:
        spread = np.arange(tokens, dtype=np.int32) % adapters if adapters else np.full(tokens, -1, dtype=np.int32)
        self.batch.tokens.fill(np.random.default_rng(1).permutation(spread), self.tables.rank_groups)
        torch.cuda.synchronize()


def measure(layer: Layer, adapters: Adapters, tokens: int, counts: list[int]) -> dict[str, Any]:
    form, stacked, inputs = layer.form, layer.stacked, layer.inputs(tokens)

    def base(i: int) -> None:
        products.mix_stacked(inputs[i][0], inputs[i][2], stacked, form)

    def adding(i: int) -> None:
        mix_adding(inputs[i][0], inputs[i][2], stacked, form, adapters.kernels)

    found: dict[str, Any] = {"tokens": tokens, "base": round(timed(base), 1)}
    for count in [0, *(count for count in counts if count <= tokens)]:
        adapters.assign(tokens, count)
        found[f"{count} adapters" if count else "unfused"] = round(timed(adding), 1)

    def one_by_one() -> torch.Tensor:
        x, _, routing = inputs[0]
        first, second = (lambda e, x: x @ stacked.gate_up[e].T), (lambda e, x: x @ stacked.down[e].T)
        return mix(x, routing, first, second, form, adapters.torch)

    adapters.assign(tokens, 1)
    expected = one_by_one().float()
    torch.cuda.synchronize()
    began = time.perf_counter()
    one_by_one()
    torch.cuda.synchronize()
    found["torch, 1 adapter"] = round((time.perf_counter() - began) * 1e6)
    got = mix_adding(inputs[0][0], inputs[0][2], stacked, form, adapters.kernels).float()
    found["deviation"] = round(float((got - expected).norm() / expected.norm()), 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256, 2048, 8192])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    spec = spec_of(json.loads((HERE / "models" / "qwen3-30b-a3b" / "config.json").read_text()))
    experts = next(mlp for mlp in spec.mlps if isinstance(mlp, ExpertsSpec))
    torch.manual_seed(0)
    report: dict[str, Any] = describe() | {"gpu": describe_gpu(), "rank": args.rank, "routings": ROUTINGS, "layers": []}
    with torch.inference_mode():
        layer = Layer(experts, spec.hidden_size)
        adapters = Adapters(layer.form, max(args.adapters), args.rank)
        report["adapter_bytes"] = adapters.bytes
        for tokens in args.tokens:
            report["layers"].append(measure(layer, adapters, tokens, args.adapters))
            print(json.dumps(report["layers"][-1]), flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
