"""Products of a few rows on a CPU with weights in each packed form, beside bfloat16's and the memory's limit.

    python benchmarks/code_products.py
    python benchmarks/code_products.py --rows 1 16 --forms E4M3 NVFP4

Reads matrices [1536, 1536] that do not fit the caches, `--count` of each form, one after another in one program, and
prints billions of weights per second, medians of `--rounds` in turns. bfloat16 and float32 are unquantized matrices,
multiplied with activations of their dtype; all but bfloat16 and integers are multiplied with activations in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

from octavo.models.load.gguf_blocks import _NONLINEAR, _SIX_BITS, _THREE_BITS, _TWO_BITS
from octavo.models.load.quantized.codes import FLOATS
from octavo.native.bindings import Dtype, StepArgs
from octavo.native.builder import ProgramBuilder, row_bytes
from octavo.native.program import Pool, Program
from octavo.nn.quant.blocks import BlockQuantized
from octavo.nn.quant.packed import Matrix, packed
from octavo.nn.weights import E2M1, Codebook, QuantizedBlocks, Stored

RESULTS = Path(__file__).resolve().parent / "results"
SIZE = 1536
E4M3, E5M2 = FLOATS[torch.float8_e4m3fn], FLOATS[torch.float8_e5m2]
NF4 = Codebook("table", torch.linspace(-1, 1, 16))
CODES: dict[str, tuple[Codebook, int, bool]] = {
    "NF4": (NF4, 64, False),
    "NVFP4": (E2M1, 16, False),
    "MXFP4": (E2M1, 32, False),
    "IQ4_NL": (_NONLINEAR, 32, False),
    "Q2_K": (_TWO_BITS, 16, True),
    "Q3_K": (_THREE_BITS, 16, False),
    "Q6_K": (_SIX_BITS, 16, False),
    "E4M3": (E4M3, SIZE, False),
    "E4M3, tiles": (E4M3, 128, False),
    "MXFP8": (E4M3, 32, False),
    "E5M2": (E5M2, SIZE, False),
}
"""Numbers, inputs that share a scale, minima."""
INTEGERS = {"4 bits": (4, False), "4 bits, minima": (4, True), "8 bits": (8, False)}
FORMS: dict[str, Callable[[], Stored]] = {
    "bfloat16": lambda: torch.randn(SIZE, SIZE).bfloat16(),
    "float32": lambda: torch.randn(SIZE, SIZE),
    "bfloat16, widened": lambda: torch.randn(SIZE, SIZE).bfloat16(),
    "float16, widened": lambda: torch.randn(SIZE, SIZE).half(),
    **{name: (lambda form=form: integers(*form)) for name, form in INTEGERS.items()},
    **{name: (lambda form=form: codes(*form)) for name, form in CODES.items()},
}


def integers(bits: int, minima: bool) -> QuantizedBlocks:
    values = torch.randint(0, 1 << bits, (SIZE, SIZE), dtype=torch.uint8)
    scales = torch.rand(SIZE, SIZE // 32).half()
    return QuantizedBlocks(values, scales, scales / 3 if minima else None, 1 << (bits - 1), bits)


def codes(book: Codebook, group: int, minima: bool) -> QuantizedBlocks:
    finite = book.numbers.isfinite().nonzero().flatten().to(torch.uint8)
    values = finite[torch.randint(len(finite), (SIZE, SIZE))]
    scales = torch.rand(SIZE, SIZE // group) + 0.1
    return QuantizedBlocks(values, scales, scales / 3 if minima else None, 0, book.bits, book=book)


def matrices(name: str, count: int) -> list[Matrix]:
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    scheme = BlockQuantized(dtype, torch.device("cpu"))
    scheme.prepare([{"weight": FORMS[name]()}])
    first = packed(scheme)
    copies = [first]
    for _ in range(count - 1):
        scheme.packed, scheme.weight = None, None
        form = (first.zero_point, first.minima, first.order, first.book, first.group)
        copies.append(Matrix(first.dtype, first.rows, first.columns, first.weight.clone(), None, *form))
    return copies


class Products:
    """A program that multiplies the same rows with each matrix."""

    def __init__(self, pool: Pool, name: str, rows: int, count: int) -> None:
        self.matrices = matrices(name, count)
        b = ProgramBuilder.make(SIZE * 4, SIZE * 4, planes=2)
        meets = b.meets(self.matrices[0].dtype)
        rounded = 0
        if meets is not Dtype.FLOAT:
            rounded = b.buffer(row_bytes(meets, SIZE, 2))
            if meets is Dtype.INT8:
                b.quantize(0, rounded, Dtype.FLOAT, SIZE, zero_point=self.matrices[0].zero_point)
            else:
                b.narrow(0, rounded, SIZE)
        for matrix in self.matrices:
            matrix.emit(b, rounded, 1)
        self.x, self.y = torch.randn(rows, SIZE), torch.zeros(rows, SIZE)
        self.step = StepArgs(tokens=rows)
        self.step.external[:2] = (self.x.data_ptr(), self.y.data_ptr())
        self.program, self.operations = Program(pool, b), len(b.ops)
        self.weights = count * SIZE * SIZE
        self.nbytes = sum(matrix.nbytes for matrix in self.matrices)

    def seconds(self) -> float:
        began = time.perf_counter()
        self.program.run(0, self.operations, self.step)
        return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help=f"such as {RESULTS.name}/code_products.json")
    args = parser.parse_args()
    pool = Pool(args.threads)
    result: dict[str, Any] = {**describe(), "command": sys.argv[1:], "rows": {}}
    for rows in args.rows:
        every = {name: Products(pool, name, rows, args.count) for name in args.forms}
        taken: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(args.rounds + 1):
            for name, products in every.items():
                taken[name].append(products.seconds())
        found = {}
        for name, products in every.items():
            seconds = statistics.median(taken[name][1:])
            found[name] = {
                "weights_per_ns": round(products.weights / seconds / 1e9, 2),
                "gb_per_s": round(products.nbytes / seconds / 1e9, 1),
                "bits": round(products.nbytes * 8 / products.weights, 2),
            }
            print(rows, f"{name:16}", found[name], flush=True)
        result["rows"][rows] = found
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
