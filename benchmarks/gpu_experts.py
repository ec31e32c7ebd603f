"""A layer's experts on one GPU: routing, sorting, both products and the sum, with candidates of their division.

    python benchmarks/gpu_experts.py [--model DIR] [--tokens 1 16 256 ...] [--sweep] [--output FILE]

Weights and routings are random, four routings one after another in a CUDA graph; figures are medians. Bytes are those
of the experts that any token chose, once; operations those of the choices, without padding. `--sweep` tries all
candidates, compares their results with those of the chosen division, and prints the fastest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_workloads import ceilings
from machine import describe, describe_gpu
from torch import Tensor

from octavo.device.ahead import Ahead, target_of
from octavo.models.feed_forwards.spec import ExpertsSpec
from octavo.models.registry import spec_of
from octavo.nn.experts_spec import ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_products as products
from octavo.nn.ops import few_rows
from octavo.nn.ops.expert_products import Tiling
from octavo.nn.ops.expert_rows import RowPlan, add_rows, gate_rows, mix_rows
from octavo.nn.ops.expert_weights import StackedWeights
from octavo.nn.ops.routing import Routing

HERE = Path(__file__).parent
ROUTINGS = 4
BEFORE = [RowPlan(2, 2048, 8), RowPlan(2, 2048, 4), RowPlan(4, 1024, 4), RowPlan(1, 2048, 4), RowPlan(4, 2048, 8)]
BEFORE += [RowPlan(8, 512, 4), RowPlan(8, 2048, 8), RowPlan(4, 2048, 4)]
BEHIND = [RowPlan(2, 1024, 4), RowPlan(4, 1024, 4), RowPlan(1, 1024, 2), RowPlan(4, 1024, 8), RowPlan(2, 1024, 2)]
BEHIND += [RowPlan(8, 1024, 8), RowPlan(1, 1024, 4), RowPlan(4, 256, 4)]


def candidates(height: int, *, gated: bool) -> list[Tiling]:
    """Return divisions of this height: (width, depth, warps, stages) and more."""
    if height <= 64:
        shapes = [(64, 128, 4, 3), (64, 64, 4, 6), (64, 128, 4, 2), (32, 128, 4, 4), (128, 64, 8, 4)]
        if not gated:
            shapes = [(128, 64, 4, 4), (128, 128, 4, 3), (64, 128, 4, 4), (256, 64, 8, 4)]
        found = [Tiling(height, *shape, turned=True, copies_rows=not gated) for shape in shapes]
        return [*found, found[0]._replace(side_by_side=4), found[0]._replace(copies=False, copies_rows=False)]
    shapes = [(128, 64, 8, 4), (128, 64, 8, 3)] if gated else [(256, 64, 8, 4), (256, 64, 8, 3), (128, 64, 4, 4)]
    found = [Tiling(height, *shape, side_by_side=4, halves=True, copies_rows=not gated) for shape in shapes]
    found += [found[0]._replace(side_by_side=count) for count in (1, 2, 8, 16)]
    return [*found, found[0]._replace(halves=False), found[0]._replace(copies=False, copies_rows=False)]


def heights(tokens: int, form: ExpertsForm, top_k: int) -> list[int]:
    mean = tokens * top_k / form.num_experts
    return [height for height in (16, 32, 64, 128) if mean / 4 <= height <= 8 * max(mean, 2)] or [128]


class Layer:
    """One layer's random weights, and inputs of some numbers of tokens."""

    def __init__(self, spec: ExpertsSpec, hidden: int) -> None:
        self.routing = spec.routing
        self.form = ExpertsForm(num_experts=spec.num_experts, hidden_size=hidden, size=spec.size)
        count, size = spec.num_experts, spec.size
        kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.stacked = StackedWeights(
            torch.randn(count, 2 * size, hidden, **kind) * hidden**-0.5,
            torch.randn(count, hidden, size, **kind) * size**-0.5,
        )

    def inputs(self, tokens: int) -> list[tuple[Tensor, Tensor, Routing]]:
        found = []
        for _ in range(ROUTINGS):
            logits = torch.randn(tokens, self.form.num_experts, device="cuda")
            x = torch.randn(tokens, self.form.hidden_size, device="cuda", dtype=torch.bfloat16)
            found.append((x, logits, products.route_on_device(logits, RoutingSpec(top_k=self.routing.top_k))))
        return found

    def work(self, inputs: list[tuple[Tensor, Tensor, Routing]]) -> tuple[float, float]:
        """Return the mean bytes of the chosen experts and the operations of all choices."""
        one = 3 * self.form.size * self.form.hidden_size
        chosen = statistics.mean(len(routing.experts.unique()) for *_, routing in inputs)
        return 2 * one * chosen, 2 * one * inputs[0][2].experts.numel()


def timed(run: Callable[[int], object]) -> float:
    """Return the microseconds of one call, of ROUTINGS recorded in a graph; the median of seven replays."""
    for i in range(ROUTINGS):
        run(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(ROUTINGS):
            run(i)
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / ROUTINGS)
    return statistics.median(times[1:])


def measure(layer: Layer, tokens: int) -> dict[str, Any]:
    """Time each part with the chosen division."""
    form, stacked, inputs = layer.form, layer.stacked, layer.inputs(tokens)
    nbytes, flops = layer.work(inputs)
    found: dict[str, Any] = {"tokens": tokens}
    found["route"] = timed(lambda i: products.route_on_device(inputs[i][1], layer.routing))
    found["mix"] = timed(lambda i: products.mix_stacked(inputs[i][0], inputs[i][2], stacked, form))
    found["tb_s"] = nbytes / found["mix"] / 1e6
    found["tflop_s"] = flops / found["mix"] / 1e6
    before, behind = products.tilings_for(inputs[0][0], layer.routing.top_k, stacked, form)
    found["sort"] = timed(lambda i: products.sort(inputs[i][2], stacked, form, before.height))
    for name, tiling in (("gate_up", before), ("down", behind)):
        found[name] = product_us(layer, inputs, tiling, gated=name == "gate_up")
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}


def buffers(layer: Layer, inputs: list[tuple[Tensor, Tensor, Routing]], height: int) -> Any:
    x = inputs[0][0]
    choices = inputs[0][2].experts.numel()
    sorted_ = [products.sort(routing, layer.stacked, layer.form, height) for *_, routing in inputs]
    inner = torch.randn(choices, layer.form.size, device="cuda", dtype=x.dtype)
    return sorted_, inner, x.new_empty(choices, layer.form.hidden_size)


def product_us(layer: Layer, inputs: list[tuple[Tensor, Tensor, Routing]], tiling: Tiling, *, gated: bool) -> float:
    sorted_, inner, rows = buffers(layer, inputs, tiling.height)

    def run(i: int) -> None:
        x, out = (inputs[i][0], inner) if gated else (inner, rows)
        products.multiply(x, layer.stacked, layer.form, inputs[i][2], *sorted_[i], out, tiling, first=gated)

    return timed(run)


def sweep(layer: Layer, tokens: int) -> dict[str, Any]:
    """Return the fastest candidates of each product, with their microseconds."""
    inputs = layer.inputs(tokens)
    nbytes, flops = layer.work(inputs)
    x, _, routing = inputs[0]
    chosen = products.tilings_for(x, layer.routing.top_k, layer.stacked, layer.form)
    expected = products.mix_tiles(x, routing, layer.stacked, layer.form, chosen).total().float()
    found: dict[str, Any] = {"tokens": tokens, "floor_us": round(max(nbytes / 4.2e6, flops / 7.5e8), 1)}
    for height in heights(tokens, layer.form, layer.routing.top_k):
        for gated in (True, False):
            other = chosen[1 if gated else 0]
            other = candidates(height, gated=not gated)[0] if other.height != height else other
            best: dict[Tiling, float] = {}
            for tiling in (*candidates(height, gated=gated), *candidates(height, gated=gated)):
                try:
                    if tiling not in best:
                        both = (tiling, other) if gated else (other, tiling)
                        got = products.mix_tiles(x, routing, layer.stacked, layer.form, both).total().float()
                        error = ((got - expected).norm() / expected.norm()).item()
                        if not error < 0.01:
                            print("WRONG", tokens, tiling, gated, error, flush=True)
                    spent = product_us(layer, inputs, tiling, gated=gated)
                    best[tiling] = min(spent, best.get(tiling, spent))
                except Exception as failure:  # a candidate that does not compile or fit
                    print("FAILED", tokens, tiling, gated, str(failure)[:100], flush=True)
            found[f"{'gate_up' if gated else 'down'}-{height}"] = ranked([(us, one) for one, us in best.items()])
    if tokens <= 8:
        found["rows"] = ranked(
            [(rows_us(layer, inputs, one, BEHIND[0]), one) for one in BEFORE]
            + [(rows_us(layer, inputs, BEFORE[0], one), ("down", *one)) for one in BEHIND],
            16,
        )
    if tokens == 1:
        found |= one_token(layer, inputs)
    return found


def one_token(layer: Layer, inputs: list[tuple[Tensor, Tensor, Routing]]) -> dict[str, Any]:
    """Time the launches of a single token, which have the norms and the residual sum in them."""
    form, stacked, spec = layer.form, layer.stacked, layer.routing
    stream, norm = inputs[0][0].float(), (torch.rand(form.hidden_size, device="cuda", dtype=torch.bfloat16), 1e-6)
    router = torch.randn(form.num_experts, form.hidden_size, device="cuda", dtype=torch.bfloat16)
    inner = gate_rows(stream, norm, inputs[0][2], stacked, form)

    def gated(i: int, plan: RowPlan | None = None) -> None:
        gate_rows(stream, norm, inputs[i][2], stacked, form, plan)

    def added(i: int, plan: RowPlan | None = None) -> None:
        add_rows(inner, inputs[i][2], stacked, form, stream, plan)

    def whole(i: int) -> None:
        few_rows.fused_product(stream, router, norm=norm, dtype=torch.float32)
        routing = products.route_on_device(inputs[i][1], spec)
        add_rows(gate_rows(stream, norm, routing, stacked, form), routing, stacked, form, stream)

    found = {
        "gate_rows": ranked([(timed(partial(gated, plan=one)), one) for one in BEFORE]),
        "add_rows": ranked([(timed(partial(added, plan=one)), one) for one in BEHIND]),
    }
    stream.copy_(inputs[0][0])
    return {**found, "whole": round(timed(whole), 1)}


def ranked(times: list[tuple[float, Any]], most: int = 12) -> list[Any]:
    """Return the fastest, as (µs, numbers of the candidate)."""
    return [(round(us, 1), *(int(v) if not isinstance(v, str) else v for v in one)) for us, one in sorted(times)[:most]]


def rows_us(layer: Layer, inputs: Any, before: RowPlan, behind: RowPlan) -> float:
    form, stacked = layer.form, layer.stacked
    return timed(lambda i: mix_rows(inputs[i][0], inputs[i][2], stacked, form, None, (before, behind)))


def compile_all(layer: Layer, counts: list[int]) -> None:
    """Compile all candidates on all cores."""
    ahead = Ahead(target_of(torch.device("cuda")))
    inputs = {tokens: layer.inputs(tokens) for tokens in counts}
    with ahead.collecting():
        for tokens, given in inputs.items():
            x, _, routing = given[0]
            for height in heights(tokens, layer.form, layer.routing.top_k):
                order, tiles = products.sort(routing, layer.stacked, layer.form, height)
                choices = routing.experts.numel()
                inner, rows = x.new_empty(choices, layer.form.size), x.new_empty(choices, layer.form.hidden_size)
                for gated in (True, False):
                    source, out = (x, inner) if gated else (inner, rows)
                    for tiling in candidates(height, gated=gated):
                        form, stacked = layer.form, layer.stacked
                        products.multiply(source, stacked, form, routing, order, tiles, out, tiling, first=gated)
        for x, logits, _ in [given[0] for tokens, given in inputs.items() if tokens <= 8]:
            compile_rows(layer, x, logits)
    print("compiled", ahead.wait(), flush=True)


def compile_rows(layer: Layer, x: Tensor, logits: Tensor) -> None:
    form, stacked, routing = layer.form, layer.stacked, products.route_on_device(logits, layer.routing)
    norm = (x[0].contiguous(), 1e-6)
    for before, behind in [*((one, BEHIND[0]) for one in BEFORE), *((BEFORE[0], one) for one in BEHIND)]:
        mix_rows(x, routing, stacked, form, None, (before, behind))
        inner = gate_rows(x.float(), norm, routing, stacked, form, before)
        add_rows(inner, routing, stacked, form, x.float(), behind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 2048, 8192])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = spec_of(json.loads((args.model / "config.json").read_text()))
    experts = next(mlp for mlp in spec.mlps if isinstance(mlp, ExpertsSpec))
    torch.manual_seed(0)
    report: dict[str, Any] = {**describe(), "gpu": describe_gpu(), "ceilings": ceilings(), "parts": [], "sweep": []}
    print(json.dumps(report["ceilings"]), flush=True)
    with torch.inference_mode():
        layer = Layer(experts, spec.hidden_size)
        if args.sweep:
            compile_all(layer, args.tokens)
        for tokens in args.tokens:
            report["parts"].append(measure(layer, tokens))
            print(json.dumps(report["parts"][-1]), flush=True)
        for tokens in args.tokens if args.sweep else ():
            report["sweep"].append(sweep(layer, tokens))
            for name, value in report["sweep"][-1].items():
                print(name, value[:5] if isinstance(value, list) else value, flush=True)
            if args.output:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
