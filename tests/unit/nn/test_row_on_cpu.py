"""The CUDA kernels of one row, compiled for the CPU: which thread copies, reads and sums what. Tests on a GPU are in
oracle/test_fragments.py and oracle/test_row8.py."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cuda_on_cpu
import pytest
import torch
from cuda_on_cpu import EmulatedKernel
from quantized_kit import blocks_of, codes_of, value_of
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops import few_fragments, fragments, ring, stored_row
from octavo.nn.ops.fragments import Form, Fragments
from octavo.nn.ops.ring import RingPlan, RowForm, columns_for
from octavo.nn.ops.stored_row import StoredForm
from octavo.nn.quant.coded_fragments import pack_coded
from octavo.nn.quant.fragments import pack_fragments

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
EPS, SCALE = 1e-5, 3.0
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-3}
"""Dtype of results -> largest relative error."""
# Bits, group, minima; outputs, inputs; warps, steps of a span, spans in the ring; operations. Spans that end beyond the
# inputs, warps without any, blocks of more strips than others.
INTEGERS = {
    "4 bits, groups of 128": (4, 128, False, 192, 1024, (4, 2, 3), "normed"),
    "4 bits, groups of 128, gated": (4, 128, False, 192, 1024, (4, 2, 2), "gated normed"),
    "4 bits, groups of 64, minima": (4, 64, True, 64, 832, (4, 2, 3), "added out_float"),
    "4 bits, groups of 192": (4, 192, False, 64, 576, (2, 4, 2), "added biased"),
    "4 bits, groups of 32": (4, 32, False, 128, 320, (4, 2, 2), "normed x_float biased out_float"),
    "4 bits, whole columns": (4, 0, True, 64, 512, (4, 1, 5), ""),
    "8 bits, groups of 128": (8, 128, True, 128, 384, (2, 2, 2), "gated normed x_float"),
    "8 bits, whole columns": (8, 0, False, 128, 704, (4, 2, 2), "normed"),
    "8 bits, groups of 16": (8, 16, True, 64, 192, (2, 4, 2), "added"),
}
# Bits of integers or kind of codes, group, minima; inputs; rows of x, parts of the inputs; warps, steps of a span,
# spans in the ring; operations.
SEVERAL_SMALL = {
    "4 bits, groups of 128, 3 gated": (4, 128, False, 1024, 3, 1, (16, 2, 2), "gated"),
    "4 bits, groups of 32, minima, 8": (4, 32, True, 1088, 8, 1, (16, 1, 2), "added out_float"),
    "4 bits, groups of 64, in two parts": (4, 64, True, 1024, 5, 2, (16, 1, 2), "biased"),
    "8 bits, whole columns, in two parts": (8, 0, False, 768, 4, 2, (16, 1, 2), "added"),
    "8 bits, groups of 16, 2": (8, 16, True, 320, 2, 1, (16, 1, 2), ""),
    "a table, groups of 64, 8": ("table", 64, False, 576, 8, 1, (16, 1, 2), "out_float"),
}
# Numbers, rows of x, inputs, operations. Fewer rows than columns, inputs beyond the last span.
SEVERAL = {
    "plain, 2": (torch.bfloat16, 2, 320, ""),
    "plain, 3 gated": (torch.bfloat16, 3, 512, "gated"),
    "plain, 8": (torch.bfloat16, 8, 544, "added out_float"),
    "integers, 5": (torch.int8, 5, 448, "biased"),
    "integers, 2 gated": (torch.int8, 2, 512, "gated out_float"),
    "integers, 8": (torch.int8, 8, 1088, "added"),
}
# Kind, group; outputs, inputs; the same.
CODES = {
    "E4M3, groups of 32, gated": ("e4m3", 32, 128, 320, (4, 2, 2), "gated normed x_float"),
    "E4M3, groups of 128": ("e4m3", 128, 64, 1024, (4, 2, 3), "added biased out_float"),
    "E4M3, whole columns": ("e4m3", 0, 128, 704, (4, 2, 2), "normed"),
    "a table, groups of 64": ("table", 64, 64, 832, (4, 2, 3), "normed biased"),
    "a table, groups of 16, gated": ("table", 16, 128, 192, (2, 4, 2), "gated"),
    "a table, whole columns": ("table", 0, 64, 512, (4, 1, 5), "added out_float"),
}
STORED = {
    "integers": (torch.int8, 320, "normed"),
    "integers, gated": (torch.int8, 512, "gated normed x_float"),
    "plain": (torch.bfloat16, 320, "added"),
    "plain, in two parts": (torch.bfloat16, 160, "normed x_float biased out_float"),
}


def operations(names: str) -> RowForm:
    return RowForm(*(name in names.split() for name in RowForm._fields[:-1]))


class Row:
    """The other operands of a product with a matrix [N, K], and the result in float64."""

    def __init__(self, form: RowForm, exact: Tensor, dtype: torch.dtype) -> None:
        outputs, inputs = exact.shape
        outputs //= form.sides
        self.x = (torch.randn(inputs) * SCALE).to(torch.float32 if form.x_float else dtype)
        self.norm, self.bias = torch.rand(inputs).to(dtype), torch.randn(form.sides * outputs).to(dtype)
        self.stream = torch.randn(outputs).to(torch.float32 if form.out_float else dtype)
        row = self.x.double()
        if form.normed:
            row = row * (row.square().mean() + EPS).rsqrt() * self.norm.double()
        y = exact @ row + (self.bias.double() if form.biased else 0)
        if form.gated:
            gate, up = y.chunk(2)
            y = F.silu(gate) * up
        self.expected = y + self.stream.double() if form.added else y


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


HALF = pytest.param(torch.float16, marks=pytest.mark.slow)


def nightly(forms: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the names of forms as parameters; those in `names` are marked slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in names)) for name in forms]


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=str)
@pytest.mark.parametrize(
    "form", nightly(INTEGERS, "4 bits, groups of 192", "8 bits, groups of 128", "8 bits, groups of 16")
)
def test_packed_integers(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    bits, group, minima, outputs, inputs, divided, names = INTEGERS[form]
    blocks = blocks_of(bits, group, minima, outputs, inputs)
    matrix = pack_fragments([blocks], CPU, group or inputs)
    assert fragments.form_of(matrix) == Form(bits, 0 if group == 0 and not minima else group or inputs, minima)
    check_row(matrix, value_of(blocks), divided, operations(names), dtype, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=str)
@pytest.mark.parametrize("form", CODES)
def test_packed_codes(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind, group, outputs, inputs, divided, names = CODES[form]
    blocks = codes_of(kind, group, outputs, inputs)
    matrix = pack_coded([blocks], CPU)
    assert matrix is not None
    check_row(matrix, value_of(blocks), divided, operations(names), dtype, tmp_path)


def check_row(
    matrix: Fragments, exact: Tensor, divided: tuple[int, int, int], fused: RowForm, dtype: torch.dtype, folder: Path
) -> None:
    """Compare the kernel with float64, in blocks that copy at once or late."""
    (warps, span, depth), row = divided, Row(fused, exact, dtype)
    plan = RingPlan(warps, span, 200 << 10)
    form = fragments.form_of(matrix)
    source, macros, _, shared = fragments.row_source(form, dtype, matrix.outputs, matrix.inputs, fused, plan)
    assert macros["DEPTH"] >= depth
    macros["DEPTH"] = depth
    library = cuda_on_cpu.compiled(source, "row", macros, folder)
    book = matrix.scales if matrix.book is None else matrix.book
    for grid, late in itertools.product((3, matrix.outputs // fused.sides // 16), (False, True)):
        out = row.stream.clone()
        tensors = [row.x, row.norm, matrix.codes, matrix.scales, row.bias, out, book]
        cuda_on_cpu.launch(library, tensors, [EPS], [1], (grid, 1, 1), shared, late=late)
        assert off(out, row.expected) < LIMITS[out.dtype], (grid, late)


@pytest.mark.parametrize("form", STORED)
def test_numbers_as_they_are_stored(form: str, tmp_path: Path) -> None:
    dtype, inputs, names = STORED[form]
    outputs, fused = 192, operations(names)
    values = torch.randn(outputs, inputs) / inputs**0.5
    scales = torch.rand(outputs) / 100 + 0.01
    codes = (values / scales[:, None]).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)
    exact = codes.double() * (scales[:, None].double() if dtype == torch.int8 else 1)
    row = Row(fused, exact, torch.bfloat16)
    stored_as = StoredForm(dtype, 0, torch.bfloat16, outputs, inputs)
    source, macros, _, shared = stored_row.source_of(stored_as, fused, RingPlan(4, 2, 200 << 10))
    macros["DEPTH"] = 3
    library = cuda_on_cpu.compiled(source, "stored_row", macros, tmp_path)
    for late in (False, True):
        out = row.stream.clone()
        tensors = [row.x, row.norm, codes, scales, row.bias, out, row.x]  # nothing is joined
        cuda_on_cpu.launch(library, tensors, [EPS], [1], (5, 1, 1), shared, late=late)
        assert off(out, row.expected) < LIMITS[out.dtype], late


@pytest.mark.parametrize("form", nightly(SEVERAL, "plain, 2", "integers, 5"))
def test_several_rows(form: str, tmp_path: Path) -> None:
    dtype, count, inputs, names = SEVERAL[form]
    outputs, fused = 192, operations(names)
    values, scales = torch.randn(outputs, inputs) / inputs**0.5, torch.rand(outputs) / 100 + 0.01
    if dtype == torch.bfloat16:
        codes, exact = values.to(dtype), values.to(dtype).double()
    else:
        codes = values / scales[:, None]
        codes = (codes.round().clamp(-127, 127) if dtype == torch.int8 else codes).to(dtype)
        exact = codes.double() * scales[:, None].double()
    rows = [Row(fused, exact, torch.bfloat16) for _ in range(count)]
    x, stream = torch.stack([row.x for row in rows]), torch.stack([row.stream for row in rows])
    x[-1] *= 1e4  # rows are scaled apart
    bias = rows[0].bias
    y = x.double() @ exact.T + (bias.double() if fused.biased else 0)
    if fused.gated:
        y = F.silu(y[:, : outputs // 2]) * y[:, outputs // 2 :]
    expected = y + stream.double() if fused.added else y
    stored_as = StoredForm(dtype, 0, torch.bfloat16, outputs, inputs)
    several = fused._replace(rows=columns_for(count))
    source, macros, _, shared = stored_row.source_of(stored_as, several, RingPlan(16, 1, 200 << 10))
    macros["DEPTH"] = 2
    library = cuda_on_cpu.compiled(source, "stored_row", macros, tmp_path)
    for late in (False, True):
        out = stream.clone()
        cuda_on_cpu.launch(library, [x, x, codes, scales, bias, out, x], [EPS], [count], (5, 1, 1), shared, late=late)
        for got, wanted in zip(out, expected, strict=True):
            assert off(got, wanted) < LIMITS[out.dtype], late


@pytest.mark.parametrize("form", nightly(SEVERAL_SMALL, "8 bits, groups of 16, 2", "4 bits, groups of 128, 3 gated"))
def test_several_rows_of_small_numbers(form: str, tmp_path: Path) -> None:
    of, group, minima, inputs, count, parts, (warps, span, depth), names = SEVERAL_SMALL[form]
    outputs, fused, dtype = 192, operations(names), torch.bfloat16
    coded = isinstance(of, str)
    blocks = codes_of(of, group, outputs, inputs) if coded else blocks_of(of, group, minima, outputs, inputs)
    matrix = pack_coded([blocks], CPU) if coded else pack_fragments([blocks], CPU, group or inputs)
    assert matrix is not None
    exact, x = value_of(blocks), (torch.randn(count, inputs) * SCALE).to(dtype)
    x[-1] *= 1e3  # rows are scaled apart
    bias = torch.randn(outputs).to(dtype)
    start = torch.randn(count, outputs // fused.sides).to(torch.float32 if fused.out_float else dtype)
    y = x.double() @ exact.T + (bias.double() if fused.biased else 0)
    if fused.gated:
        y = F.silu(y[:, : outputs // 2]) * y[:, outputs // 2 :]
    expected = y + start.double() if fused.added else y
    book, outs = matrix.scales if matrix.book is None else matrix.book, [start.clone(), start.clone()]
    of_scales = matrix.scales.shape[1] // parts if fragments.form_of(matrix).group else 0
    for part in range(parts):
        own = fused._replace(rows=columns_for(count), added=fused.added or part > 0, biased=fused.biased and part == 0)
        source, macros, _, shared = fragments.row_source(
            fragments.form_of(matrix), dtype, outputs, inputs, own, RingPlan(warps, span, 200 << 10), parts
        )
        macros["DEPTH"] = depth
        library = cuda_on_cpu.compiled(source, "row", macros, tmp_path)
        begin = part * inputs // parts
        scales, codes = matrix.scales[:, part * of_scales :], matrix.codes[:, begin // 64 :]
        for out, late in zip(outs, (False, True), strict=True):
            tensors = [x[:, begin:], x, codes, scales, bias, out, book]
            cuda_on_cpu.launch(library, tensors, [EPS], [count], (3, 1, 1), shared, late=late)
    for out in outs:
        for got, wanted in zip(out, expected, strict=True):
            assert off(got, wanted) < (2 * LIMITS[out.dtype] if parts > 1 else LIMITS[out.dtype])


@pytest.mark.parametrize("form", ["4 bits", pytest.param("8 bits", marks=pytest.mark.slow), "plain"])
def test_rows_that_do_not_fit_are_multiplied_in_parts(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the launches that a GPU gets."""
    monkeypatch.setattr(ring, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(EmulatedKernel, "folder", tmp_path, raising=False)
    monkeypatch.setattr(few_fragments, "_kernel", lambda *args: EmulatedKernel("row", *fragments.row_source(*args)))
    monkeypatch.setattr(stored_row, "_kernel", lambda *args: EmulatedKernel("stored_row", *stored_row.source_of(*args)))
    outputs, inputs, count, dtype = 64, 14336, 8, torch.bfloat16
    x, bias, stream = torch.randn(count, inputs).to(dtype), torch.randn(outputs).to(dtype), torch.randn(count, outputs)
    if form == "plain":
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
        stored_as, exact = StoredForm(dtype, 0, dtype, outputs, inputs), weight.double()
        assert stored_row.rows_form(stored_as, count, gated=False).parts == 2
        product = partial(stored_row.rows_product, x, weight, None, stored_as)
    else:
        bits, group, minima = (4, 128, True) if form == "4 bits" else (8, 0, False)
        blocks = blocks_of(bits, group, minima, outputs, inputs)
        matrix, exact = pack_fragments([blocks], CPU, group or inputs), value_of(blocks)
        assert few_fragments._division(fragments.form_of(matrix), inputs, count, gated=False)[0] == 2
        product = partial(few_fragments.product, x, matrix)
    y = x.double() @ exact.T
    assert off(product(bias=bias, dtype=torch.float32), y + bias.double()) < LIMITS[torch.float32]
    target = stream.clone()
    assert product(add_to=target) is target
    assert off(target, y + stream.double()) < LIMITS[torch.float32]
