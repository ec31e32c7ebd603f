"""Kernels of low-rank adapters on one GPU, alone and among the products of a decoder of Llama 3.1 8B's shape.

    python benchmarks/lora_kernels.py [--rows 1 8 64 256] [--adapters 1 8 64] [--timeline] [--kernels]

Adapters of one rank on all linear layers, in blocks of a KV cache, random weights. `layers` times all products of a
decoding step with their norms and gates, recorded as a CUDA graph, without attention and head: without adapters, with
adapters that no row uses, and with rows spread over some adapters. `timeline` lists the launches of one layer among the
others. `kernels` times each kernel alone, and how many bytes of weights it reads a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, describe_gpu
from torch import Tensor

from octavo.device.ahead import Ahead, target_of
from octavo.device.transfer import link_of
from octavo.features.lora.ahead import compile_ahead
from octavo.features.lora.gpu import LowRankDelta
from octavo.features.lora.layout import Geometry, Manifest, Piece, Target, TargetPart, layout
from octavo.features.lora.tables import RANKS, Assigned, Tables
from octavo.nn.build import Build
from octavo.nn.norm import RMSNorm
from octavo.nn.ops import products
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.gpu import OnGpu
from octavo.nn.shard import COL, ROW
from octavo.nn.stream import Stream
from octavo.nn.weights import WeightLayer

WIDTH, INNER, KV = 4096, 14336, 1024
LAYERS = 32
PARTS = {
    "qkv": (WIDTH, (WIDTH, KV, KV)),
    "out": (WIDTH, (WIDTH,)),
    "gate_up": (WIDTH, (INNER, INNER)),
    "down": (INNER, (WIDTH,)),
}
"""Inputs and the parts' outputs of a layer's products."""
BLOCK_TOKENS = 16
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


class World:
    """Adapters in a pool of blocks, and a layer's deltas by name."""

    def __init__(self, count: int, rank: int, max_rank: int, slices: int = LAYERS) -> None:
        targets = [
            Target(f"{name}.{layer}", tuple(TargetPart(str(i), inputs, n, inputs, n) for i, n in enumerate(sizes)))
            for layer in range(LAYERS)
            for name, (inputs, sizes) in PARTS.items()
        ]
        block_bytes = LAYERS * BLOCK_TOKENS * 2 * KV * DTYPE.itemsize
        geometry = Geometry(slices, block_bytes // slices, DTYPE.itemsize, by_output=True)
        pieces = [Piece(i, part, rank) for i, target in enumerate(targets) for part in range(len(target.parts))]
        placed = layout(targets, Manifest(tuple(pieces)), geometry)
        self.bytes = placed.num_tiles * geometry.tile_bytes
        blocks = np.random.default_rng(0).permutation(placed.num_blocks * count)
        elements = geometry.slice_bytes // DTYPE.itemsize
        self.pool = torch.empty(slices, len(blocks), elements, dtype=DTYPE, device=DEVICE)
        self.pool.normal_(std=0.02)
        self.tables = Tables(targets, geometry, count, placed.num_blocks, link_of(DEVICE))
        for index in range(count):
            own = blocks[index * placed.num_blocks : (index + 1) * placed.num_blocks]
            self.tables.enter(index, own.tolist(), placed)
        self.targets, self.max_rank = targets, max_rank
        self.rows = Assigned(8192, count, link_of(DEVICE), -(-max_rank // RANKS))
        self.rank = rank

    def deltas(self) -> list[dict[str, LowRankDelta]]:
        return [
            {
                name: LowRankDelta(
                    self.pool,
                    self.tables,
                    self.targets[layer * len(PARTS) + i],
                    layer * len(PARTS) + i,
                    self.max_rank,
                    self.rows,
                )
                for i, name in enumerate(PARTS)
            }
            for layer in range(LAYERS)
        ]

    def assign(self, rows: int, adapters: int) -> None:
        """Spread the rows over some adapters, in a random order; 0 for none."""
        spread = np.arange(rows, dtype=np.int32) % adapters if adapters else np.full(rows, -1, dtype=np.int32)
        self.rows.fill(np.random.default_rng(1).permutation(spread), self.tables.rank_groups)
        torch.cuda.synchronize()


class Layer:
    """A decoder's layer without attention: its products with their norms, gate and residual sums."""

    def __init__(self, build: Build) -> None:
        self.norms = [build.norm(name, WIDTH, 1e-5) for name in ("first", "second")]
        shards = {"qkv": COL, "out": ROW, "gate_up": COL, "down": ROW}
        self.linears = {
            name: build.linear(
                *map(str, range(len(sizes))),
                inputs=inputs,
                outputs=sizes,
                shard=shards[name],
                gates=name == "gate_up",
            )
            for name, (inputs, sizes) in PARTS.items()
        }
        for one in (*self.norms, *self.linears.values()):
            one.place([self._random(one, want.spec.shape) for want in one.wanted()])

    @staticmethod
    def _random(layer: WeightLayer, shape: tuple[int, ...]) -> Tensor:
        if isinstance(layer, RMSNorm):
            return torch.ones(shape, dtype=DTYPE, device=DEVICE)
        return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(std=0.01)

    def forward(self, stream: Stream) -> None:
        heads = self.linears["qkv"].after_norm(stream, self.norms[0])
        self.linears["out"].into(stream, heads[:, :WIDTH].contiguous())
        gated = self.linears["gate_up"].after_norm(stream, self.norms[1], gated=True)
        self.linears["down"].into(stream, gated)


def build_layers(rows: list[int]) -> list[Layer]:
    build = Build(DTYPE, DEVICE, None, everywhere(OnGpu, DTYPE, DEVICE))
    layers = [Layer(build) for _ in range(LAYERS)]
    like = []
    for name in PARTS:
        weights = [_multiplied(layer, name) for layer in layers[:4]]
        like.append(products.Like(weights, DTYPE, added=name in ("out", "down"), gated=name == "gate_up"))
    products.choose(like, [count for count in rows if count > 1], lambda: None)
    return layers


def _multiplied(layer: Layer, name: str) -> Tensor:
    scheme = layer.linears[name].scheme
    assert isinstance(scheme, OnGpu)
    assert scheme.weight is not None
    return scheme.weight


def forward(layers: list[Layer], x: Tensor) -> Tensor:
    stream = Stream(x)
    for layer in layers:
        layer.forward(stream)
    return stream.total()


def graph_of(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def micros(graph: torch.cuda.CUDAGraph, rounds: int = 5, calls: int = 3) -> float:
    """Median microseconds of a replay."""
    graph.replay()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def set_deltas(layers: list[Layer], deltas: list[dict[str, LowRankDelta]] | None) -> None:
    for i, layer in enumerate(layers):
        for name, linear in layer.linears.items():
            linear.delta = None if deltas is None else deltas[i][name]


def measure_layers(layers: list[Layer], world: World, rows: int, adapters: list[int]) -> dict[str, Any]:
    """Return microseconds of all layers: without adapters, and for rows of 0 to some adapters.

    Medians of rounds in turns, since the clocks drift.
    """
    x = torch.randn(rows, WIDTH, dtype=DTYPE, device=DEVICE)
    run = partial(forward, layers, x)
    set_deltas(layers, None)
    graphs = {"base": graph_of(run)}
    world.assign(rows, 1)
    kept = world.deltas()
    set_deltas(layers, kept)
    graphs["adapted"] = graph_of(run)
    set_deltas(layers, None)
    times: dict[str, list[float]] = {}
    counts = [0, *(count for count in adapters if count <= rows)]
    for _ in range(5):
        for name, graph in graphs.items():
            for count in counts if name != "base" else [0]:
                world.assign(rows, count)
                times.setdefault(f"{name} {count}", []).append(micros(graph, rounds=2))
    return {name: round(statistics.median(some), 1) for name, some in times.items()}


def compile_layers(layers: list[Layer], world: World, rows: list[int]) -> float:
    """Compile the kernels in parallel; return the seconds."""
    began = time.perf_counter()
    linears = layers[0].linears
    compile_ahead([(linears[name], one) for name, one in world.deltas()[0].items()], [], None, DTYPE, DEVICE)
    ahead = Ahead(target_of(DEVICE))
    with ahead.collecting():
        for count in rows:
            forward(layers[:1], torch.empty(count, WIDTH, dtype=DTYPE, device=DEVICE))
    ahead.wait()
    return round(time.perf_counter() - began, 1)


def timeline(layers: list[Layer], world: World, rows: int, adapters: int) -> list[Any]:
    """Launches of one layer in the middle: start and duration in microseconds, stream, programs, name."""
    x = torch.randn(rows, WIDTH, dtype=DTYPE, device=DEVICE)
    world.assign(rows, adapters)
    set_deltas(layers, None if adapters == 0 else world.deltas())
    graph = graph_of(partial(forward, layers, x))
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = sorted((one for one in events if one.get("cat") == "kernel"), key=lambda one: one["ts"])
    each = -(-len(kernels) // LAYERS)
    some = kernels[each * 16 : each * 17 + 1]
    return [
        [
            round(one["ts"] - some[0]["ts"], 1),
            round(one["dur"], 1),
            one["args"].get("stream"),
            one["args"].get("grid"),
            one["name"][:48],
        ]
        for one in some
    ]


def measure_kernels(world: World, rows: int, adapters: list[int]) -> list[dict[str, Any]]:
    """Microseconds a launch, and TB/s of the adapters' weights, of each kernel."""
    deltas = world.deltas()
    found = []
    for name, (inputs, sizes) in PARTS.items():
        x = torch.randn(rows, inputs, dtype=DTYPE, device=DEVICE)
        y = torch.zeros(rows, sum(sizes), dtype=DTYPE, device=DEVICE)
        own = [each[name] for each in deltas]
        read = {"shrink": inputs * len(sizes), "expand": sum(sizes)}
        world.assign(rows, 1)
        value = own[0].shrink(x)
        for kind, numbers in read.items():
            if kind == "shrink":
                run = partial(_each, [partial(one.shrink, x) for one in own])
            elif name == "gate_up":
                run = partial(_each, [partial(one.gate, value, y) for one in own])
            else:
                run = partial(_each, [partial(one.expand, value, y) for one in own])
            graph = graph_of(run)
            for count in [0, *(count for count in adapters if count <= rows)]:
                world.assign(rows, count)
                taken = micros(graph, rounds=3) / LAYERS
                nbytes = count * world.rank * numbers * DTYPE.itemsize
                entry = {"target": name, "kernel": kind, "adapters": count, "us": round(taken, 2)}
                found.append(entry | {"tb_s": round(nbytes / taken / 1e6, 2)})
    return found


def _each(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=64)
    parser.add_argument("--slices", type=int, default=LAYERS, help="places of a block's bytes; 1: all are contiguous")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="each kernel alone")
    parser.add_argument("--no-layers", action="store_true", help="without `layers`")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    world = World(max(args.adapters), args.rank, args.max_rank, args.slices)
    report: dict[str, Any] = describe() | {"rank": args.rank, "slices": args.slices, "adapter_bytes": world.bytes}
    report["gpu"] = describe_gpu()

    def note(name: str, value: Any) -> None:
        report[name] = value
        print(name, json.dumps(value), flush=True)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    with torch.inference_mode():
        layers = build_layers(args.rows)
        note("compile_s", compile_layers(layers, world, args.rows))
        for rows in () if args.no_layers else sorted(args.rows, reverse=True):
            note(f"layers, {rows} rows", measure_layers(layers, world, rows, args.adapters))
        for rows, count in itertools.product(args.rows, args.adapters) if args.timeline else ():
            if count <= rows:
                note(f"timeline, {rows} rows, {count} adapters", timeline(layers, world, rows, count))
        for rows in args.rows if args.kernels else ():
            note(f"kernels, {rows} rows", measure_kernels(world, rows, args.adapters))


if __name__ == "__main__":
    main()
