"""Products of one row in a rank's layers: kernels and their divisions, between launches that leave the memory idle.

    python benchmarks/one_row.py [--shapes llama-3.1-8b/2 llama-3.1-70b/2] [--output FILE]

A graph has the four products of several layers, each with weights of its own, and stand-ins for the sums over ranks
and for attention, which only take time. One matrix at a time, each candidate takes the place of the division in use,
and the whole layer is timed: what a candidate prefetches while the launch before runs counts, too. Microseconds of a
layer, medians; the floor is the bytes of the weights at 4.2 TB/s, without the stand-ins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from machine import describe, describe_gpu

from octavo.nn.ops import few_rows, row16
from octavo.nn.ops.few_rows import RowPlan
from octavo.nn.ops.ring import HALF_SHARED, SHARED, RingPlan
from octavo.nn.ops.triton_gemv import row_kernel
from octavo.nn.ops.triton_overlap import follow, overlap

HERE = Path(__file__).resolve().parent
LAYERS = 6
SUM_CYCLES, ATTENTION_CYCLES = 6500, 8500
BANDWIDTH = 4.2e6  # bytes per microsecond


class Matrix(NamedTuple):
    name: str
    outputs: int
    inputs: int
    gated: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.outputs * self.inputs * (2 if self.gated else 1)


@triton.jit
def clock(zero):
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [zero], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def stand_in_kernel(x, out, cycles, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):  # noqa: N803
    """Copy the beginning of x to out, slowly."""
    follow(OVERLAPS)
    at = tl.arange(0, WIDTH)
    value = tl.load(x + at)
    zero = (cycles * 0).to(tl.int32)
    begin = clock(zero)
    while clock(zero) - begin < cycles:
        zero = zero * 1
    tl.store(out + at, value)


def matrices_of(shape: str) -> list[Matrix]:
    """Return the matrices of one rank of `MODEL/RANKS`."""
    model, _, ranks = shape.partition("/")
    config = json.loads((HERE / "models" / model / "config.json").read_text())
    hidden, size = config["hidden_size"], int(ranks or 1)
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] // size, config["num_key_value_heads"] // size
    wide = config["intermediate_size"] // size
    return [
        Matrix("qkv", (heads + 2 * kv) * head, hidden),
        Matrix("out", hidden, heads * head),
        Matrix("gate and up", wide, hidden, gated=True),
        Matrix("down", hidden, wide),
    ]


Plan = RowPlan | RingPlan


def used(matrix: Matrix) -> RowPlan:
    how: dict[str, Any] = {"gated": matrix.gated, "normed": False, "device": torch.device("cuda")}
    return few_rows._held_plan(matrix.outputs, matrix.inputs, **how) or few_rows.row_plan(matrix.inputs, **how)


def candidates(matrix: Matrix) -> Iterator[Plan]:
    yield used(matrix)
    yield from (RingPlan(warps, span, SHARED) for warps, span in ((16, 2), (16, 1), (8, 2), (8, 1), (8, 4)))
    yield from (RingPlan(8, span, HALF_SHARED) for span in (1, 2))
    depths = [depth for depth in (512, 1024, 2048, 4096, 8192) if depth <= matrix.inputs]
    for rows, depth, warps in itertools.product((1, 2, 4, 8), depths, (4, 8)):
        held = rows * depth * (2 if matrix.gated else 1)
        if not 32 * warps * 16 <= held <= 32 * warps * 64:
            continue
        if matrix.inputs % depth and matrix.inputs / depth < 2:
            continue
        for ahead in (0, 1024, 4096):
            if ahead <= matrix.inputs:
                yield RowPlan(rows, depth, warps, ahead)
    if matrix.inputs & (matrix.inputs - 1) == 0 and not matrix.gated:
        held = (rows for rows in (1, 2, 4) if rows * matrix.inputs <= 16384)
        yield from (RowPlan(rows, matrix.inputs, 8, 0, held=True) for rows in held)


def multiply(matrix: Matrix, plan: Plan, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(plan, RingPlan):
        return row16.row_product(x[:, : matrix.inputs], weight, gated=matrix.gated, plan=plan)
    out = x.new_empty(1, matrix.outputs)
    row_kernel[(triton.cdiv(matrix.outputs, plan.block_n),)](
        x,
        x,
        weight,
        x,
        out,
        out,
        0.0,
        N=matrix.outputs,
        K=matrix.inputs,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        NORMED=False,
        GATED=matrix.gated,
        BIASED=False,
        ADDED=False,
        num_warps=plan.warps,
        AHEAD=plan.ahead,
        HELD=plan.held,
        **overlap(x.device),
    )
    return out


def weight_of(matrix: Matrix) -> torch.Tensor:
    rows = matrix.outputs * (2 if matrix.gated else 1)
    return torch.randn(rows, matrix.inputs, device="cuda", dtype=torch.bfloat16) / matrix.inputs**0.5


def compile_one(job: tuple[Matrix, RowPlan]) -> None:
    matrix, plan = job
    rows = matrix.outputs * (2 if matrix.gated else 1)
    weight = torch.empty(rows, matrix.inputs, device="cuda", dtype=torch.bfloat16)
    x = torch.empty(1, matrix.inputs, device="cuda", dtype=torch.bfloat16)
    multiply(matrix, plan, x, weight)


class Layers:
    """The products of some layers, one after another."""

    def __init__(self, matrices: list[Matrix]) -> None:
        self.matrices = matrices
        self.weights = [[weight_of(matrix) for matrix in matrices] for _ in range(LAYERS)]
        widest = max(max(matrix.inputs, matrix.outputs) for matrix in matrices)
        self.x, self.y = (torch.randn(1, widest, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def launch(self, plans: Mapping[str, RowPlan]) -> None:
        options = overlap(self.x.device)
        for weights in self.weights:
            for matrix, weight in zip(self.matrices, weights, strict=True):
                if matrix.name != "down":
                    cycles = ATTENTION_CYCLES if matrix.name == "out" else SUM_CYCLES
                    stand_in_kernel[(1,)](self.y, self.y, cycles, WIDTH=2048, num_warps=8, **options)
                multiply(matrix, plans[matrix.name], self.x, weight)

    def deviation(self, matrix: Matrix, plan: Plan) -> float:
        """Return the relative error of a product."""
        weight, x = self.weights[0][self.matrices.index(matrix)], self.x[:, : matrix.inputs]
        exact = x.double() @ weight.double().T
        if matrix.gated:
            gate, up = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gate) * up
        return float((multiply(matrix, plan, x, weight).double() - exact).norm() / exact.norm())

    def layer_us(self, plans: Mapping[str, RowPlan]) -> float:
        self.launch(plans)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                self.launch(plans)
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / (2 * LAYERS))
        return statistics.median(times[2:])


def improve(shape: str) -> dict[str, Any]:
    """Return the microseconds of a layer with each candidate for each matrix."""
    matrices = matrices_of(shape)
    jobs = [(matrix, plan) for matrix in matrices for plan in dict.fromkeys(candidates(matrix))]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=4)
    layers = Layers(matrices)
    plans = {matrix.name: used(matrix) for matrix in matrices}
    floor = sum(matrix.bytes for matrix in matrices) / BANDWIDTH
    found: dict[str, Any] = {"floor_us": round(floor, 1), "in_use_us": round(layers.layer_us(plans), 2)}
    for matrix in sorted(matrices, key=lambda one: -one.bytes):
        timed = {plan: layers.layer_us(plans | {matrix.name: plan}) for plan in dict.fromkeys(candidates(matrix))}
        best = min(timed, key=timed.__getitem__)
        ranked = sorted(timed.items(), key=lambda one: one[1])
        rings = [(plan, us) for plan, us in ranked if isinstance(plan, RingPlan)]
        found[matrix.name] = {
            "in use": [list(plans[matrix.name]), round(timed[plans[matrix.name]], 2)],
            "best": [[list(plan), round(us, 2)] for plan, us in ranked[:6]],
            "rings": [[list(plan), round(us, 2)] for plan, us in rings],
            "deviations": [layers.deviation(matrix, plan) for plan in (best, rings[0][0])],
        }
        print(shape, matrix, json.dumps(found[matrix.name]), flush=True)
        plans[matrix.name] = best
    found["best_us"] = round(layers.layer_us(plans), 2)
    found["again_us"] = round(layers.layer_us({matrix.name: used(matrix) for matrix in matrices}), 2)
    print(
        shape, json.dumps({name: found[name] for name in ("floor_us", "in_use_us", "best_us", "again_us")}), flush=True
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b/2", "llama-3.1-70b/2"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": describe(), "gpu": describe_gpu(), "shapes": {}}
    for shape in args.shapes:
        report["shapes"][shape] = improve(shape)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
