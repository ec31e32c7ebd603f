"""Products of one row with packed integers on a Hopper GPU, in the layers of Llama 3.1 8B.

    python benchmarks/packed_row.py [--form w4a16] [--sweep] [--output FILE]

A recorded graph has the four products of several layers, each with weights of its own, so that none is in the cache;
each takes the result of the one before. The microseconds of a product are those of a layer less those of one without
it, and the floor is its bytes at 4.5 TB/s: at 4 bits in groups of 128, 2.9 for qkv, 1.9 for out, 13.5 for gate and up,
6.7 for down, 25.0 for a layer. With --sweep, each division into warps takes the place of the one in use, one matrix at
a time, and the whole layer is timed. Results are compared with float64's first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import describe, describe_gpu
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops import fragments, nvrtc
from octavo.nn.ops.fragments import Fragments
from octavo.nn.ops.ring import HALF_SHARED, SHARED, RingPlan, RowForm
from octavo.nn.quant.fragments import unpack_fragments
from octavo.nn.quant.online import ONLINE

HIDDEN, INNER, LAYERS = 4096, 14336, 8
BANDWIDTH = 4.5e6  # bytes per microsecond
DTYPE = torch.bfloat16
LIMIT = 1e-2
MOST_WARPS = 32
"""Of a multiprocessor whose threads have 64 registers."""


class Matrix(NamedTuple):
    name: str
    outputs: int
    inputs: int
    normed: bool
    gated: bool = False

    def form(self) -> RowForm:
        added = not self.normed
        return RowForm(self.gated, self.normed, biased=False, added=added, x_float=False, out_float=False)


MATRICES = (
    Matrix("qkv", 6144, HIDDEN, normed=True),
    Matrix("out", HIDDEN, HIDDEN, normed=False),
    Matrix("gate and up", 2 * INNER, HIDDEN, normed=True, gated=True),
    Matrix("down", HIDDEN, INNER, normed=False),
)
DIVISIONS = [(16, 2), (16, 1), (16, 4), (8, 2), (8, 4), (8, 8), (14, 4), (32, 1), (32, 2)]
Plans = Mapping[str, RingPlan]


def candidates(matrix: Matrix, packed: Fragments) -> Iterator[RingPlan]:
    usual = fragments.ring_plan(fragments.form_of(packed), gated=matrix.gated)
    yield usual
    for (warps, span), shared in itertools.product(DIVISIONS, (SHARED, HALF_SHARED)):
        plan = RingPlan(warps, span, shared)
        resident = warps * (2 if shared == HALF_SHARED else 1)
        if resident <= MOST_WARPS and plan != usual and source(matrix, packed, plan)[1]["DEPTH"] >= 2:
            yield plan


def source(matrix: Matrix, packed: Fragments, plan: RingPlan) -> tuple[str, dict[str, int], int, int]:
    return fragments.row_source(fragments.form_of(packed), DTYPE, matrix.outputs, matrix.inputs, matrix.form(), plan)


class Layers:
    """The products of some layers, one after another."""

    def __init__(self, form: str) -> None:
        self.weights = [{matrix.name: packed_one(matrix, form) for matrix in MATRICES} for _ in range(LAYERS)]
        self.start, self.scale = torch.randn(1, HIDDEN, device="cuda", dtype=DTYPE), torch.ones(HIDDEN, device="cuda")
        self.stream, self.norm = self.start.clone(), (self.scale.to(DTYPE), 1e-5)
        self.attended, self.inner = (torch.randn(1, size, device="cuda", dtype=DTYPE) for size in (6144, INNER))

    def multiply(self, matrix: Matrix, weight: Fragments, plan: RingPlan | None, x: Tensor, add_to: Tensor) -> Tensor:
        norm = self.norm if matrix.normed else None
        target = None if matrix.normed else add_to
        return fragments.row_product(x, weight, norm=norm, gated=matrix.gated, add_to=target, narrow=DTYPE, plan=plan)

    def launch(self, plans: Plans, without: str | None = None) -> None:
        made = {"qkv": self.attended, "gate and up": self.inner}
        for weights in self.weights:
            for matrix in MATRICES:
                if matrix.name == without:
                    continue
                source_of = {"out": "qkv", "down": "gate and up"}.get(matrix.name)
                x = self.stream if source_of is None else made[source_of][:, : matrix.inputs]
                made[matrix.name] = self.multiply(matrix, weights[matrix.name], plans.get(matrix.name), x, self.stream)

    def deviation(self, matrix: Matrix, plan: RingPlan | None) -> float:
        """Return the relative error of a product."""
        x = torch.randn(1, matrix.inputs, device="cuda", dtype=DTYPE)
        weight = self.weights[0][matrix.name]
        row = x.double()
        if matrix.normed:
            row = row * (row.square().mean() + 1e-5).rsqrt()
        exact = row @ unpack_fragments(weight).double().T
        if matrix.gated:
            gate, up = exact.chunk(2, 1)
            exact = F.silu(gate) * up
        target = torch.zeros(1, matrix.outputs, device="cuda", dtype=DTYPE)
        return float((self.multiply(matrix, weight, plan, x, target).double() - exact).norm() / exact.norm())

    def layer_us(self, plans: Plans, without: str | None = None) -> float:
        self.stream.copy_(self.start)
        self.launch(plans, without)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.stream.copy_(self.start)
            self.launch(plans, without)
            self.launch(plans, without)
        times = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (2 * LAYERS))
        return statistics.median(times[2:])


def packed_one(matrix: Matrix, form: str) -> Fragments:
    values = torch.randn(matrix.outputs, matrix.inputs, device="cuda", dtype=DTYPE) / matrix.inputs**0.5
    made = ONLINE[form].pack([values])
    assert isinstance(made, Fragments), "integers on a Hopper GPU"
    return made


def bytes_of(weight: Fragments) -> int:
    return weight.codes.nbytes + weight.scales.nbytes


def sweep(layers: Layers, report: dict[str, Any]) -> None:
    """Time a layer with each division for each matrix."""
    weights = layers.weights[0]
    plans = {matrix.name: list(candidates(matrix, weights[matrix.name])) for matrix in MATRICES}
    for matrix in MATRICES:
        for plan in plans[matrix.name]:
            text, macros, _, _ = source(matrix, weights[matrix.name], plan)
            nvrtc.compile_ahead(text, macros)
    for matrix in MATRICES:
        times = {}
        for plan in plans[matrix.name]:
            off = layers.deviation(matrix, plan)
            times[plan] = layers.layer_us({matrix.name: plan}) if off < LIMIT else float("inf")
            if not off < LIMIT:
                print(f"{matrix.name} {tuple(plan)}: error {off:.3g}", flush=True)
        best = sorted(times, key=lambda plan: times[plan])
        report[f"layer with another {matrix.name}"] = {str(tuple(plan)): times[plan] for plan in best}
        print(matrix.name, *(f"{tuple(plan)}: {times[plan]:.2f};" for plan in best), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", default="w4a16", choices=("w4a16", "w8a16"))
    parser.add_argument("--sweep", action="store_true", help="time other divisions, too")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": describe(), "gpu": describe_gpu(), "form": args.form}
    with torch.inference_mode():
        layers = Layers(args.form)
        for matrix in MATRICES:
            off = layers.deviation(matrix, None)
            assert off < LIMIT, f"{matrix.name}: error {off:.3g}"
        whole = layers.layer_us({})
        sizes = {name: bytes_of(weight) for name, weight in layers.weights[0].items()}
        report["layer"] = {"us": whole, "floor": sum(sizes.values()) / BANDWIDTH}
        print(f"layer: {whole:.2f} us, floor {sum(sizes.values()) / BANDWIDTH:.2f}", flush=True)
        for name, size in sizes.items():
            us = whole - layers.layer_us({}, without=name)
            report[name] = {"us": us, "floor": size / BANDWIDTH, "gb_per_s": size / us / 1e3}
            print(f"{name}: {us:.2f} us, floor {size / BANDWIDTH:.2f}, {size / us / 1e3:.0f} GB/s", flush=True)
        if args.sweep:
            sweep(layers, report)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
