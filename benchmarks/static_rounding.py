"""Rounding to E4M3 with a static scale beside scales of rows, on one GPU, for the layers of Llama 3.1 8B.

    python benchmarks/static_rounding.py [--rows 64 256 512 2048] [--output FILE]

Microseconds in recorded graphs: of norm, gate and rows alone; of attention with the rounding of its results, in decodes
over 1,024 tokens and in one prompt; and of the products. The bits of both kinds of attention are compared first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_attention import DTYPE, PAGE, Work, seconds_of
from quantized_products import SHAPES
from torch import Tensor

from octavo.nn.attention.base import AttentionSpec
from octavo.nn.attention.triton import TritonAttention, attend_parts
from octavo.nn.ops import floats
from octavo.nn.rounded import Rounded

ROWS = (64, 256, 512, 2048)
SPEC = AttentionSpec(32, 8, 128, 128**-0.5)
WIDTH, INNER, CONTEXT = 4096, 14336, 1024
SCALE = 0.02
REPEATS = 10
MOST_OTHERS = 1e-3
"""Numbers that may differ between the two variants of a kernel, if they are compiled to other sums."""
Run = Callable[[Tensor | None], Any]
"""Does the work with an inverse of the static scale, or with scales of rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "microseconds": {}}
    inverse = torch.tensor([1 / SCALE], device="cuda")
    with torch.inference_mode():
        for rows in args.rows:
            for name, run in (*operations(rows), *attention(rows, inverse), *products(rows)):
                times = {kind: timed(run, given) for kind, given in (("rows", None), ("static", inverse))}
                report["microseconds"][f"{name}, {rows}"] = times
                print(f"{name:24s} {rows:5d}", times, flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def timed(run: Run, inverse: Tensor | None) -> float:
    return round(seconds_of((lambda: [run(inverse) for _ in range(REPEATS)], REPEATS)) * 1e6, 2)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


def operations(rows: int) -> Iterator[tuple[str, Run]]:
    x, residual, weight, gate_up = randn(rows, WIDTH), randn(rows, WIDTH), randn(WIDTH), randn(rows, 2 * INNER)
    yield "norm", lambda inverse: floats.RoundedNorm(weight, 1e-5, inverse=inverse).add(x, residual)
    yield "gate", lambda inverse: floats.round_gated(gate_up, inverse=inverse)
    yield "rows", lambda inverse: floats.round_rows(residual, inverse=inverse)


def attention(rows: int, inverse: Tensor) -> Iterator[tuple[str, Run]]:
    for name, lengths, counts in (("decode", [CONTEXT] * rows, [1] * rows), ("prompt", [rows], [rows])):
        work = Work(SPEC, DTYPE, lengths, counts, copies=1)
        work.step.attn = TritonAttention(DTYPE, SPEC).prepare(work.step, PAGE)
        q, fresh = work.qkv[:, : SPEC.num_heads], work.qkv[:, SPEC.num_heads :]

        def attend(by: Tensor | None, work: Work = work, q: Tensor = q, fresh: Tensor = fresh) -> Tensor:
            return attend_parts(q, fresh, work.caches[0], None, work.step, SPEC, None, by)

        separate = floats.round_rows(attend(None).flatten(1), inverse=inverse).codes
        others = (separate.view(torch.uint8) != attend(inverse).flatten(1).view(torch.uint8)).float().mean()
        if others:
            print(f"attention, {name}: {others:.2g} of the numbers differ from those of a launch of their own")
        if others > MOST_OTHERS:
            raise SystemExit("attention rounds wrong")
        yield (
            f"attention, {name}",
            lambda by, attend=attend: attend(by) if by is not None else floats.round_rows(attend(None).flatten(1)),
        )


def products(rows: int) -> Iterator[tuple[str, Run]]:
    for name, (outputs, inputs) in SHAPES.items():
        matrix = floats.rounded(randn(outputs, inputs) * inputs**-0.5).with_input_scale(SCALE)
        own = floats.round_rows(randn(rows, inputs))

        def multiply(inverse: Tensor | None, matrix: floats.Floats = matrix, own: Rounded = own) -> Tensor:
            x = own if inverse is None else Rounded(own.codes)
            return floats.rounded_product(x, matrix, None, DTYPE)

        yield f"product {name}", multiply


if __name__ == "__main__":
    main()
