"""A layer's packed experts on one GPU beside those in bfloat16: both products, with candidates of their division.

    python benchmarks/gpu_packed_experts.py [--model DIR] [--forms fp8 w4a16 ...] [--tokens 1 16 256 ...] [--sweep]
        [--output FILE]

Weights and routings are random, four routings one after another in a CUDA graph; figures are medians in microseconds.
The floor is the bytes of the chosen experts at 4.2 TB/s. `--sweep` tries candidates, compares their results with those
of the chosen division, and prints the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_experts import HERE, Layer, ranked, timed
from machine import describe, describe_gpu

from octavo.device.ahead import Ahead, target_of
from octavo.models.feed_forwards.spec import ExpertsSpec
from octavo.models.registry import spec_of
from octavo.nn.ops import expert_products as products
from octavo.nn.ops import packed_experts
from octavo.nn.ops.expert_weights import PackedMatrices, StackedWeights
from octavo.nn.ops.packed_experts import RowPlan, Tiling
from octavo.nn.ops.tables import book_of

FORMS = ("bfloat16", "fp8", "fp8-tiles", "w8a8", "w8a16", "w4a16", "w4a16-minima", "mxfp4", "nf4")
BANDWIDTH = 4.2e6  # bytes per microsecond


def random_matrices(form: str, experts: int, outputs: int, inputs: int) -> PackedMatrices:
    """Return random matrices, whose products have about the variance of their inputs."""

    def codes(width: int, kind: torch.dtype) -> torch.Tensor:
        made = torch.randint(0, 256, (experts, outputs, width), dtype=torch.uint8, device="cuda")
        if kind == torch.float8_e4m3fn:
            made &= 0xBF  # below 2
        viewed: torch.Tensor = made.view(kind)
        return viewed

    def scales(group: int, kind: torch.dtype, largest: float) -> torch.Tensor:
        made = torch.rand(experts, inputs // group, outputs, device="cuda") + 0.5
        return (made / (largest * inputs**0.5)).to(kind)

    half, wide, dtype = torch.float16, torch.float32, torch.bfloat16
    fp8 = torch.float8_e4m3fn
    if form in ("fp8", "fp8-tiles"):
        tiled = form == "fp8-tiles"
        group = 128 if tiled else inputs
        made = scales(group, wide, 1)
        if tiled:
            made = made[..., ::128].repeat_interleave(128, 2)
        numbers = codes(inputs, fp8)
        return PackedMatrices(numbers, made, None, inputs, group, 128, "integers", True, dtype, tiled=tiled)
    if form in ("w8a8", "w8a16"):
        kind, rounds = (wide, True) if form == "w8a8" else (half, False)
        made = scales(inputs, kind, 70)
        return PackedMatrices(codes(inputs, torch.int8), made, None, inputs, inputs, 128, "integers", rounds, dtype)
    words = codes(inputs // 2, torch.int16)
    if form == "mxfp4":
        return PackedMatrices(words, scales(32, dtype, 3), None, inputs, 32, 32, "e2m1", False, dtype)
    if form == "nf4":
        book = book_of(torch.linspace(-1, 1, 16), words.device)
        return PackedMatrices(words, scales(64, half, 0.6), None, inputs, 64, 16, "table", False, dtype, book)
    made = scales(128, half, 5)
    minima = made / 2 if form == "w4a16-minima" else None
    return PackedMatrices(words, made, minima, inputs, 128, 64, "integers", False, dtype)


class PackedLayer(Layer):
    """One layer's random packed weights."""

    def __init__(self, spec: ExpertsSpec, hidden: int, form: str) -> None:
        super().__init__(replace(spec, num_experts=1), hidden)
        self.form = replace(self.form, num_experts=spec.num_experts)
        count, size = spec.num_experts, spec.size
        first = random_matrices(form, count, 2 * size, hidden)
        second = random_matrices(form, count, hidden, size)
        self.stacked = StackedWeights(first, second)
        stored = sum(one.codes.nbytes + one.scales.nbytes for one in (first, second))
        stored += sum(one.minima.nbytes for one in (first, second) if one.minima is not None)
        self.bytes_of_one = stored / count

    def floor(self, inputs: Any) -> float:
        chosen = sum(len(routing.experts.unique()) for *_, routing in inputs) / len(inputs)
        return chosen * self.bytes_of_one / BANDWIDTH


def layer_of(spec: ExpertsSpec, hidden: int, form: str) -> Layer:
    return Layer(spec, hidden) if form == "bfloat16" else PackedLayer(spec, hidden, form)


def candidates(chosen: Tiling, *, first: bool) -> list[Tiling]:
    """Return divisions of the chosen form, other ones before and after."""
    found = [chosen, chosen._replace(copies=False, copies_rows=False), chosen._replace(side_by_side=4)]
    found += [chosen._replace(stages=stages) for stages in (2, 3, 4, 5, 6) if stages != chosen.stages]
    found += [chosen._replace(width=chosen.width * 2, warps=8), chosen._replace(width=chosen.width // 2)]
    found += [chosen._replace(width=chosen.width // 2, stages=6)]
    if chosen.depth == 128:
        found += [chosen._replace(depth=64, stages=6), chosen._replace(depth=256, stages=3)]
    if chosen.height == 128:
        turned = chosen._replace(turned=True)
        wide = 64 if first else 128
        found += [turned._replace(width=wide, warps=warps, stages=3) for warps in (4, 8)]
        found += [turned._replace(width=2 * wide, warps=8, stages=3), turned._replace(width=wide, warps=8, stages=4)]
    return list(dict.fromkeys(found))


class Trial:
    """One form and number of tokens, with buffers of its products."""

    def __init__(self, layer: Layer, tokens: int) -> None:
        self.layer, self.inputs = layer, layer.inputs(tokens)
        x, _, routing = self.inputs[0]
        form, choices = layer.form, routing.experts.numel()
        self.tilings = products.tilings_for(x, layer.routing.top_k, layer.stacked, form)
        height = self.tilings[0].height
        self.sorted = [products.sort(one[2], layer.stacked, form, height) for one in self.inputs]
        self.inner = torch.randn(choices, form.size, device="cuda", dtype=x.dtype)
        self.rows = x.new_empty(choices, form.hidden_size)

    def run(self, i: int, tiling: Any, *, first: bool) -> None:
        x, _, routing = self.inputs[i]
        given, out = (x, self.inner) if first else (self.inner, self.rows)
        order, tiles = self.sorted[i]
        products.multiply(given, self.layer.stacked, self.layer.form, routing, order, tiles, out, tiling, first=first)

    def mix(self, i: int) -> None:
        products.mix_stacked(self.inputs[i][0], self.inputs[i][2], self.layer.stacked, self.layer.form)

    def candidates(self, *, first: bool) -> list[Tiling]:
        chosen = self.tilings[0 if first else 1]
        return candidates(chosen, first=first) if isinstance(chosen, Tiling) and not chosen.stays else []

    def sweep(self, *, first: bool) -> list[Any]:
        found: list[tuple[float, Any]] = []
        saved = self.inner.clone()
        self.run(0, self.tilings[0 if first else 1], first=first)
        expected = (self.inner if first else self.rows).float()
        for tiling in self.candidates(first=first):
            try:
                self.inner.copy_(saved)
                self.run(0, tiling, first=first)
                error = float(((self.inner if first else self.rows).float() - expected).norm() / expected.norm())
                if not error < 0.02:
                    print("WRONG", tiling, error, flush=True)
                found.append((timed(partial(self.run, tiling=tiling, first=first)), tiling))
            except Exception as failure:  # a candidate that does not compile or fit
                print("FAILED", tiling, str(failure)[:80].replace("\n", " "), flush=True)
        self.inner.copy_(saved)
        return ranked(found)


def row_plans(form: str) -> list[RowPlan]:
    small = form in ("w4a16", "w4a16-minima", "mxfp4", "nf4")
    sizes = itertools.product((1, 2, 4, 8, 16), (128, 256, 512) if small else (512, 1024, 2048))
    return [RowPlan(n, c, 4) for n, c in sizes if 256 <= n * c <= (4096 if small else 8192)]


def rows_sweep(layer: Layer, form: str, tokens: int) -> dict[str, Any]:
    inputs = layer.inputs(tokens)
    gate_up, down = layer.stacked.gate_up, layer.stacked.down
    assert isinstance(gate_up, PackedMatrices)
    assert isinstance(down, PackedMatrices)
    inner = packed_experts.gate_rows(inputs[0][0], None, inputs[0][2], gate_up, None, 0, layer.form)
    out = torch.empty_like(inputs[0][0])

    def before(i: int, plan: RowPlan) -> None:
        packed_experts.gate_rows(inputs[i][0], None, inputs[i][2], gate_up, None, 0, layer.form, plan)

    def behind(i: int, plan: RowPlan) -> None:
        packed_experts.sum_rows(inner, inputs[i][2], down, None, 0, layer.form, out, None, plan)

    def best(run: Callable[..., None]) -> list[Any]:
        return ranked([(timed(partial(run, plan=plan)), plan) for plan in row_plans(form)], 5)

    return {"gate_rows": best(before), "add_rows": best(behind)}


def compile_all(layers: dict[str, Layer], counts: list[int], *, sweep: bool) -> None:
    """Compile all kernels on all cores."""
    ahead = Ahead(target_of(torch.device("cuda")))
    for layer in layers.values():
        if not isinstance(layer, PackedLayer):  # its CUDA kernels would be launched, with choices that are not sorted
            continue
        for tokens in counts:
            trial = Trial(layer, tokens)
            if any(tiling.stays for tiling in trial.tilings):
                continue  # CUDA kernels would be launched, likewise
            with ahead.collecting():
                trial.mix(0)
                if sweep:
                    for first in (True, False):
                        for tiling in trial.candidates(first=first) if tokens > 4 else ():
                            trial.run(0, tiling, first=first)
    print("compiled", ahead.wait(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "models" / "qwen3-30b-a3b")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["bfloat16", "fp8", "w4a16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = spec_of(json.loads((args.model / "config.json").read_text()))
    experts = next(mlp for mlp in spec.mlps if isinstance(mlp, ExpertsSpec))
    torch.manual_seed(0)
    report: dict[str, Any] = {**describe(), "gpu": describe_gpu(), "parts": []}
    with torch.inference_mode():
        layers = {form: layer_of(experts, spec.hidden_size, form) for form in args.forms}
        compile_all(layers, args.tokens, sweep=args.sweep)
        for tokens in args.tokens:
            for form, layer in layers.items():
                trial = Trial(layer, tokens)
                found: dict[str, Any] = {"form": form, "tokens": tokens, "mix": round(timed(trial.mix), 1)}
                if isinstance(layer, PackedLayer):
                    found["floor"] = round(layer.floor(trial.inputs), 1)
                    if args.sweep and tokens <= 4:
                        found |= rows_sweep(layer, form, tokens)
                    elif args.sweep:
                        found |= {
                            name: trial.sweep(first=first) for name, first in (("gate_up", True), ("down", False))
                        }
                report["parts"].append(found)
                short = {name: value[:4] if isinstance(value, list) else value for name, value in found.items()}
                print(json.dumps(short), flush=True)
                if args.output:
                    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
