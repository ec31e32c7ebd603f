"""Products with packed matrices on one GPU, for each shape of a model's layers and each number of rows, beside BF16.

    python benchmarks/quantized_products.py [--forms w4a16 w8a16 fp8 w8a8] [--rows 1 2 ...] [--sweep] [--output FILE]

Microseconds of one product, from recorded graphs that go through several matrices, so that none stays in the cache.
Each candidate's result is compared with float32's first. With --sweep all divisions into programs are timed, not only
those in use. Products of gate and up are also timed with the gate.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from octavo.device.ahead import Ahead, target_of
from octavo.nn.ops import few_rows, floats, fragments, gated_tiles, packed, words
from octavo.nn.ops.activation import silu_mul
from octavo.nn.ops.floats import Floats
from octavo.nn.ops.fragments import Fragments
from octavo.nn.ops.ring import RowForm
from octavo.nn.ops.words import Words
from octavo.nn.quant.fragments import unpack_fragments
from octavo.nn.quant.online import ONLINE
from octavo.nn.quant.words import unpack_words

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512)
READ = 150 << 20
"""Bytes of matrices that a recorded graph reads: three times the cache of an H200."""
LIMIT = 2e-2
ROUNDED = 6e-2
"""Largest relative errors of products: of rounded activations, and otherwise."""

TILES = (
    (16, 8, 16, 2),
    (16, 4, 16, 2),
    (32, 4, 8, 2),
    (64, 4, 8, 2),
    (64, 2, 8, 2),
    (128, 2, 6, 2),
    (128, 4, 8, 1),
    (192, 4, 6, 1),
    (256, 4, 6, 1),
    (256, 2, 6, 1),
)
"""Tiles of a product with fragments: rows, depth, stages, blocks; see `RowsPlan`."""
LARGE = 128

Run = Callable[[Tensor, Any], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", default=list(ONLINE), choices=list(ONLINE))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--best", type=int, default=3, help="candidates to print for each shape and number of rows")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report |= {"triton": triton.__version__, "microseconds": {}}
    with torch.inference_mode():
        compile_all(args)
        for shape, form in itertools.product(args.shapes, args.forms):
            matrices, whole = matrices_of(form, shape)
            for rows in args.rows:
                x = torch.randn(rows, SHAPES[shape][1], dtype=torch.bfloat16, device="cuda")
                times = {name: measure(run, x, made, whole) for name, made, run in named(args, x, matrices, whole)}
                report["microseconds"][f"{shape} {form} {rows}"] = times
                show(shape, form, rows, times, args.best)
            del matrices, whole
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def named(
    args: argparse.Namespace, x: Tensor, matrices: list[Any], whole: list[Tensor]
) -> Iterator[tuple[str, list[Any], Run]]:
    yield "bf16", whole, bf16
    if x.shape[0] > 1 and gates(whole[0].shape[0]):
        yield "bf16, gate", whole, lambda x, weight: silu_mul(bf16(x, weight))
        if gated_tiles.fits(whole[0]):
            yield "bf16 with gate", whole, gated_tiles.product
    for name, run in candidates(matrices[0], x, sweep=args.sweep):
        yield name, matrices, run


def gates(outputs: int) -> bool:
    return outputs == SHAPES["gate_up"][0]


def fusion(outputs: int, x: Tensor) -> dict[str, Any]:
    """What a decoder fuses with the product of one row."""
    gated = gates(outputs)
    return {"gated": gated, "norm": (torch.ones_like(x[0]), 1e-5) if gated else None}


def bf16(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 1:
        return few_rows.fused_product(x, weight, **fusion(weight.shape[0], x))
    if few_rows.pays(x.shape[0], weight.shape[0]):
        return few_rows.few_product(x, weight)
    return F.linear(x, weight)


def matrices_of(form: str, shape: str) -> tuple[list[Any], list[Tensor]]:
    """Random matrices of one form, and of BF16, enough of each to leave the cache."""
    outputs, inputs = SHAPES[shape]
    values = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") * inputs**-0.5
    first = ONLINE[form].pack([values])
    size = first.codes.nbytes
    made = [first, *(copy_of(first) for _ in range(READ // size))]
    plain = dequantized(first).bfloat16()
    return made, [plain, *(plain.clone() for _ in range(READ // plain.nbytes))]


def copy_of(matrix: packed.Matrix) -> packed.Matrix:
    return replace(matrix, codes=matrix.codes.clone(), scales=matrix.scales.clone())


def dequantized(matrix: packed.Matrix) -> Tensor:
    if isinstance(matrix, Fragments):
        return unpack_fragments(matrix)
    return unpack_words(matrix) if isinstance(matrix, Words) else matrix.values()


def candidates(matrix: packed.Matrix, x: Tensor, *, sweep: bool) -> Iterator[tuple[str, Run]]:
    yield "used", used
    if x.shape[0] > 1 and gates(matrix.outputs):
        yield "used, gate", lambda x, m: silu_mul(used(x, m))
        yield "used with gate", lambda x, m: packed.gated_product(x, m, None, x.dtype)
    if isinstance(matrix, Fragments):
        yield from of_fragments(matrix, x.shape[0], sweep=sweep)
    elif isinstance(matrix, Words):
        yield from of_words(matrix, x.shape[0], sweep=sweep)
    else:
        yield from of_floats(matrix, x, sweep=sweep)


def used(x: Tensor, matrix: packed.Matrix) -> Tensor:
    if x.shape[0] == 1 and isinstance(matrix, Fragments):
        return fragments.row_product(x, matrix, narrow=x.dtype, **fusion(matrix.outputs, x))
    if x.shape[0] == 1 and isinstance(matrix, Floats):
        return floats.row_product(x, matrix, **fusion(matrix.outputs, x))
    return packed.product(x, matrix, None, x.dtype)


def of_fragments(matrix: Fragments, rows: int, *, sweep: bool) -> Iterator[tuple[str, Run]]:
    if not sweep or rows == 1:
        return
    for plan in plans_of(rows):
        yield f"rows {tuple(plan)}", partial(in_parts, fragments.rows_product, plan)
        if plan.parts == 1 and gates(matrix.outputs):
            gated = partial(fragments.rows_product, gated=True)
            yield f"rows {tuple(plan)} with gate", partial(in_parts, gated, plan)


def plans_of(rows: int) -> Iterator[fragments.RowsPlan]:
    """Divisions of a product with fragments: tiles that hold the rows, or large ones, in parts."""
    fitting = next((tile for tile, *_ in TILES if rows <= tile), LARGE)
    for tile in TILES:
        if fitting <= tile[0] <= 2 * fitting or tile[0] >= LARGE <= fitting:
            yield from (fragments.RowsPlan(*tile, parts) for parts in ((1, 2, 4, 8) if rows <= 1024 else (1,)))


def of_words(matrix: Words, rows: int, *, sweep: bool) -> Iterator[tuple[str, Run]]:
    def plan_of(*plan: Any) -> tuple[str, Run]:
        made = words.RowsPlan(*plan)
        return f"rows {tuple(made)}", partial(in_parts, words.rows_product, made)

    if rows > 32:
        yield "widen + library", lambda x, m: F.linear(x, packed.widened(m, x))
    if not sweep:
        return
    m = max(16, triton.next_power_of_2(rows))
    if rows <= 64:
        shapes = ((32, 2), (64, 4), (128, 4), (128, 8)) if rows <= 16 else ((64, 4), (128, 4))
        for (n, warps), parts, stages in itertools.product(shapes, parts_of(matrix, rows), (2, 3, 5)):
            yield plan_of(m, n, parts, warps, stages)
    else:
        tiles = ((64, 64, 4), (128, 64, 4), (128, 128, 8))
        for (m, n, warps), parts in itertools.product(tiles, parts_of(matrix, rows)):
            yield plan_of(m, n, parts, warps, 2)


def of_floats(matrix: Floats, x: Tensor, *, sweep: bool) -> Iterator[tuple[str, Run]]:
    rows = x.shape[0]
    if rows > 1:
        dtype = matrix.rounded_dtype
        yield "rounded", lambda x, m: floats.rounded_product(floats.round_rows(x, dtype), m, None, x.dtype)
        made = floats.round_rows(x, dtype)
        codes, scales = made.codes, made.scales
        if dtype == torch.int8:
            yield "of them the library", lambda x, m: torch._int_mm(codes, m.codes.t())
        else:
            yield (
                "of them the library",
                lambda x, m: torch._scaled_mm(
                    codes, m.codes.t(), scales, m.scales[None], out_dtype=x.dtype, use_fast_accum=True
                ),
            )
    if not sweep:
        return
    if rows == 1:
        for n, k, warps in itertools.product((2, 4, 8, 16), (1024, 2048, 4096), (4, 8)):
            if n * k <= 8192 * warps // 2:
                plan = floats.RowPlan(n, k, warps)
                yield (
                    f"row {tuple(plan)}",
                    lambda x, m, plan=plan: floats.row_product(x, m, plan=plan, **fusion(m.outputs, x)),
                )
    elif rows <= 64:
        m = max(16, triton.next_power_of_2(rows))
        shapes = ((16, 256, 2), (32, 256, 4), (64, 128, 4), (128, 128, 4))
        for (n, k, warps), parts, stages in itertools.product(shapes, parts_of(matrix, rows), (3, 5)):
            made = floats.RowsPlan(m, n, k, parts, warps, stages)
            yield f"rows {tuple(made)}", partial(in_parts, floats.rows_product, made)


def parts_of(matrix: packed.Matrix, rows: int) -> Sequence[int]:
    return (1, 2) if matrix.outputs > 8192 else (1, 2, 4, 8)


def in_parts(multiply: Any, plan: Any, x: Tensor, matrix: Any) -> Tensor:
    """A product in parts, as the norm after it takes them."""
    many = isinstance(matrix, Fragments) and x.shape[0] > 64
    return multiply(x, matrix, plan, x.dtype if plan.parts == 1 or many else torch.float32)


def measure(run: Run, x: Tensor, matrices: list[Any], whole: list[Tensor]) -> float | str:
    """Microseconds of one product; what went wrong, if something did."""
    try:
        expected = x.float() @ whole[0].float().t()
        if x.shape[0] == 1 and gates(expected.shape[1]):
            expected *= (x.float().square().mean() + 1e-5).rsqrt()
        got = run(x, matrices[0])
        got = got.float().sum(0) if got.dim() == 3 else got.float()
        if got.shape != expected.shape:
            gate, up = expected.chunk(2, 1)
            expected = F.silu(gate) * up
        off = float((got - expected).norm() / expected.norm())
        limit = ROUNDED if isinstance(matrices[0], Floats) else LIMIT
        if not off < limit:
            return f"error {off:.3g}"
        return timed(lambda: [run(x, matrix) for matrix in matrices]) / len(matrices)
    except (RuntimeError, triton.TritonError) as error:
        return str(error).strip().splitlines()[-1][:60]


def timed(run: Callable[[], object]) -> float:
    """Microseconds of a recorded graph: the best of some replays."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.replay()
    best = float("inf")
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    del kept
    return best


def compile_all(args: argparse.Namespace) -> None:
    """Compile all kernels on all cores."""
    ahead = Ahead(target_of(torch.device("cuda")))
    with ahead.collecting():
        for shape, form in itertools.product(args.shapes, args.forms):
            outputs, inputs = SHAPES[shape]
            matrix = ONLINE[form].pack([torch.ones(outputs, inputs, dtype=torch.bfloat16, device="cuda")])
            if isinstance(matrix, Fragments):
                fragments.compile_ahead(matrix, torch.bfloat16)
                gated = gates(outputs)
                form_of_row = RowForm(gated, normed=gated, biased=False, added=False, x_float=False, out_float=False)
                fragments.compile_row_ahead(matrix, torch.bfloat16, form_of_row)
            weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda")
            for rows in args.rows:
                x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="cuda")
                bf16(x, weight)
                for name, run in candidates(matrix, x, sweep=args.sweep):
                    if "library" not in name and not isinstance(matrix, Fragments):
                        run(x, matrix)
    print(ahead.wait(), "kernels", flush=True)


def show(shape: str, form: str, rows: int, times: dict[str, float | str], best: int) -> None:
    plain = {name: time for name, time in times.items() if isinstance(time, float)}
    first = sorted(plain, key=lambda name: plain[name])[:best]
    always = ("bf16", "used", "rounded", "widen + library")
    kept = [name for name in plain if name.startswith(always) and name not in first]
    wrong = {name: time for name, time in times.items() if isinstance(time, str)}
    print(shape, form, rows, *(f"{name}: {plain[name]:.1f};" for name in (*first, *kept)), wrong or "", flush=True)


if __name__ == "__main__":
    main()
