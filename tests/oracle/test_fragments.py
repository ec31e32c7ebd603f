"""Small numbers in the order of a Hopper GPU's matrix units: their layout, and the CUDA kernels against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from launch_kit import check_overlap
from quantized_kit import blocks_of, codes_of, value_of
from torch import Tensor
from torch.nn import functional as F

from octavo.nn.ops import few_fragments, fragments, nvrtc, packed, words
from octavo.nn.ops.fragments import Form, Fragments, Kind
from octavo.nn.ops.ring import COLUMNS, HALF_SHARED, MOST_ROWS, SHARED, RingPlan, RowForm, rows_alone
from octavo.nn.quant.coded_fragments import pack_coded, pack_numbers
from octavo.nn.quant.fragments import pack_fragments, pack_integers, unpack_fragments
from octavo.nn.quant.online import ONLINE
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.weights import Codebook, QuantizedBlocks

CPU, GPU = torch.device("cpu"), torch.device("cuda")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
TOLERANCE = 1e-2
Sizes = tuple[int | str, int, bool, int, int]
# Bits of integers or kind of codes, group (0: all inputs), minima; outputs, inputs. An odd number of strips; steps that
# don't fill the last part.
FORMS: dict[str, Sizes] = {
    "4 bits, groups of 128": (4, 128, False, 448, 1024),
    "4 bits, groups of 128 with whole halves": (4, 128, False, 640, 512),
    "4 bits, groups of 64 with minima": (4, 64, True, 192, 832),
    "4 bits, groups of 32": (4, 32, False, 128, 320),
    "4 bits, whole columns with minima": (4, 0, True, 128, 512),
    "8 bits, groups of 128": (8, 128, True, 128, 384),
    "8 bits, groups of 32": (8, 32, False, 64, 64),
    "8 bits, whole columns": (8, 0, False, 320, 704),
    "8 bits, groups of 16": (8, 16, True, 128, 192),
    "E4M3, groups of 128": ("e4m3", 128, False, 448, 1024),
    "E4M3, groups of 32": ("e4m3", 32, False, 128, 832),
    "E4M3, groups of 16": ("e4m3", 16, False, 192, 192),
    "E4M3, whole columns": ("e4m3", 0, False, 320, 704),
    "a table, groups of 64": ("table", 64, False, 448, 1024),
    "a table, groups of 32": ("table", 32, False, 128, 832),
    "a table, groups of 16": ("table", 16, False, 192, 192),
    "a table, whole columns": ("table", 0, False, 640, 512),
}
# Of one row: blocks that take several strips, some more than others; warps without inputs; the most inputs.
ONE_ROW: dict[str, Sizes] = {
    "4 bits, groups of 64": (4, 64, False, 8896, 1088),
    "4 bits, groups of 192": (4, 192, False, 4544, 960),
    "4 bits, long rows": (4, 128, False, 4544, 14336),
    "4 bits, groups of 32 with minima": (4, 32, True, 2240, 20480),
    "4 bits, whole columns": (4, 0, False, 4544, 4096),
    "8 bits, groups of 64 with minima": (8, 64, True, 8896, 832),
    "8 bits, groups of 16 with minima": (8, 16, True, 192, 20480),
    "8 bits, whole columns": (8, 0, False, 4544, 4160),
    "E4M3, groups of 32": ("e4m3", 32, False, 4544, 1088),
    "E4M3, whole columns, long rows": ("e4m3", 0, False, 2240, 14336),
    "a table, groups of 64": ("table", 64, False, 8896, 832),
    "a table, groups of 128, long rows": ("table", 128, False, 2240, 14336),
}
PLANS: tuple[RingPlan | None, ...] = (
    None,
    RingPlan(16, 2, SHARED),
    RingPlan(8, 4, SHARED),
    RingPlan(8, 1, HALF_SHARED),
)
LARGEST_BLOCK = 227 << 10
STATIC = 6 << 10
ROWS = (1, 2, 7, 16, 33, 64, 100, 150, 200, 257, 512, 600)


def random_blocks(of: int | str, group: int, minima: bool, outputs: int, inputs: int) -> QuantizedBlocks:
    if isinstance(of, int):
        return blocks_of(of, group, minima, outputs, inputs)
    return codes_of(of, group, outputs, inputs)


def random_matrix(sizes: Sizes, dtype: torch.dtype) -> tuple[Fragments, Tensor]:
    blocks = random_blocks(*sizes)
    pack = pack_integers if blocks.book is None else pack_numbers
    matrix = pack([blocks], GPU, dtype)
    assert isinstance(matrix, Fragments)
    return matrix, value_of(blocks)


def packed_on_gpu(form: str) -> tuple[Fragments, Tensor]:
    return random_matrix(FORMS[form], torch.bfloat16)


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_stored_and_restored(form: str) -> None:
    _, group, _, outputs, inputs = FORMS[form]
    assert fragments.fits(outputs, inputs, group or inputs)
    blocks = random_blocks(*FORMS[form])
    coded = blocks.book is not None
    matrix = pack_coded([blocks], CPU) if coded else pack_fragments([blocks], CPU, group or inputs)
    assert matrix is not None
    assert matrix.group == (group or inputs)
    # Scales of codes, and numbers of tables, are rounded to float16.
    precision = 1e-3 if coded else 1e-6
    torch.testing.assert_close(unpack_fragments(matrix).double(), value_of(blocks), rtol=precision, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "scale"), [("e4m3", 2.0**-22), ("e4m3", 1e-6), ("e4m3", 1.1), ("table", 2.0**-14), ("table", 3e4)]
)
def test_scales_that_float16_has(kind: Kind, scale: float) -> None:
    """Of E4M3 divided by 2 ** -7; beside an output of zeros with any scale, and groups that count little."""
    blocks = with_scales(kind, scale)
    matrix = pack_coded([blocks], CPU)
    assert matrix is not None
    exact = value_of(blocks)
    off_by = (unpack_fragments(matrix).double() - exact).abs().amax(1)
    assert (off_by <= 2.0**-9 * exact.abs().amax(1)).all()


@pytest.mark.parametrize(("kind", "scale"), [("e4m3", 1e-9), ("e4m3", 1.5), ("table", 1e-5), ("table", 1e5)])
def test_scales_that_float16_lacks_keep_the_other_kernels(kind: Kind, scale: float) -> None:
    assert pack_coded([with_scales(kind, scale)], CPU) is None


def with_scales(kind: Kind, scale: float) -> QuantizedBlocks:
    blocks = codes_of(kind, 32, 64, 64)
    assert blocks.book is not None
    numbers = blocks.book.numbers.clone()
    if kind == "table":
        numbers /= numbers.abs().max()
        numbers[0] = 0
    blocks.values[3] = 0
    scales = torch.full_like(blocks.scales, scale)
    scales[3], scales[5, 1] = 1e-30, scale / 1e6
    return replace(blocks, scales=scales, book=Codebook(kind, numbers))


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_have_the_values_of_their_operands(bits: int) -> None:
    """As the instruction mma.m16n8k16 of PTX defines them, for the second strip and step."""
    blocks = blocks_of(bits, 64, False, 128, 128)
    codes = pack_fragments([blocks], CPU, 64).codes[1, 1].long() & 0xFFFFFFFF
    for thread, operand, pair in ((0, 0, 0), (5, 1, 1), (39, 2, 2), (127, 3, 3)):
        warp, a, b = thread // 32, thread % 32 // 4, thread % 4
        if bits == 4:
            word = int(codes[0, thread, operand]) >> 4 * pair
        else:
            word = int(codes[operand // 2, thread, operand % 2 * 2 + pair // 2]) >> 8 * (pair % 2) ^ 0x800080
        output, first = 64 + 16 * warp + a + 8 * (pair % 2), 64 + 16 * operand + 2 * b + 8 * (pair // 2)
        mask = (1 << bits) - 1
        assert [word & mask, word >> 16 & mask] == blocks.values[output, first : first + 2].tolist()


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 16), (17, 32), (64, 64), (129, 192), (193, 256), (300, 192), (512, 256)]
)
def test_tiles_leave_few_rows_empty(rows: int, tile: int) -> None:
    assert fragments.tile_rows(rows) == tile


CASES = [(form, dtype) for form in FORMS for dtype in (torch.bfloat16, torch.float16)]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile on all cores what the tests below launch one after another."""
    for form, dtype in CASES:
        matrix, _ = packed_on_gpu(form)
        fragments.compile_ahead(matrix, dtype)
        wide = residual_of(form, dtype) == torch.float32
        for fused in ((0, 1, 1, 0, wide, wide), (0, 0, 0, 1, wide, wide), (1, 1, 0, 0, wide, 0)):
            fragments.compile_row_ahead(matrix, dtype, RowForm(*map(bool, fused)))


def residual_of(form: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if list(FORMS).index(form) % 2 else dtype


@on_hopper
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_any_number_of_rows(form: str, dtype: torch.dtype) -> None:
    matrix, exact = packed_on_gpu(form)
    bias = torch.randn(matrix.outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, matrix.inputs).to(dtype)
        expected = x.double() @ exact.T
        for wanted in (dtype, torch.float32):
            assert off(packed.product(x.to(GPU), matrix, None, wanted), expected) < TOLERANCE
        assert off(packed.product(x.to(GPU), matrix, bias.to(GPU), dtype), expected + bias.double()) < TOLERANCE
        parts = packed.parts(x.to(GPU), matrix)
        assert parts is not None
        assert off(parts.float().sum(0), expected) < TOLERANCE
        stream = torch.randn(rows, matrix.outputs).to(dtype)
        target = stream.to(GPU, copy=True)
        assert packed.add_few(target, x.to(GPU), matrix) == (1 < rows <= MOST_ROWS)
        if 1 < rows <= MOST_ROWS:
            assert off(target, expected + stream.double()) < TOLERANCE


@on_hopper
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_any_number_of_rows_with_the_gate(form: str, dtype: torch.dtype) -> None:
    """Also with a bias and of halves that are not whole tiles, which another launch gates; each tile with one part."""
    matrix, exact = packed_on_gpu(form)
    bias = torch.randn(matrix.outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, matrix.inputs).to(dtype)
        product = x.double() @ exact.T
        expected = gated(product)
        for wanted in (dtype, torch.float32):
            got = packed.gated_product(x.to(GPU), matrix, None, wanted)
            assert got.dtype == wanted
            assert off(got, expected) < TOLERANCE
        assert off(packed.gated_product(x.to(GPU), matrix, bias.to(GPU), dtype), gated(product + bias)) < TOLERANCE
        if fragments.gates(matrix):
            plan = fragments.rows_plan(matrix, rows)._replace(parts=1)
            for wanted in (dtype, torch.float32):
                made = fragments.rows_product(x.to(GPU), matrix, plan, wanted, gated=True)
                assert made.shape == (1, *expected.shape)
                assert off(made[0], expected) < TOLERANCE


def gated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, 1)
    return F.silu(gate) * up


@on_hopper
def test_gates_may_be_large() -> None:
    matrix, exact = packed_on_gpu("4 bits, groups of 128 with whole halves")
    x = torch.randn(40, matrix.inputs).bfloat16() * 1e4
    plan = fragments.rows_plan(matrix, 40)._replace(parts=1)
    made = fragments.rows_product(x.to(GPU), matrix, plan, x.dtype, gated=True)[0]
    assert off(made, gated(x.double() @ exact.T)) < TOLERANCE


@on_hopper
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=str)
def test_one_row_with_the_operations_around_it(form: str, dtype: torch.dtype) -> None:
    matrix, exact = packed_on_gpu(form)
    residual = residual_of(form, dtype)
    scale, bias = torch.rand(matrix.inputs).to(dtype), torch.randn(matrix.outputs).to(dtype)
    x, stream = torch.randn(1, matrix.inputs).to(residual), torch.randn(1, matrix.outputs).to(residual)
    wide = x.double()
    normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale.double()
    norm = (scale.to(GPU), 1e-5)
    got = fragments.row_product(x.to(GPU), matrix, bias=bias.to(GPU), norm=norm, dtype=residual, narrow=dtype)
    assert got.dtype == residual
    assert off(got, normed @ exact.T + bias.double()) < TOLERANCE
    target = stream.to(GPU, copy=True)
    assert fragments.row_product(x.to(GPU), matrix, add_to=target, narrow=dtype) is target
    assert off(target, wide @ exact.T + stream.double()) < TOLERANCE
    got = fragments.row_product(x.to(GPU), matrix, norm=norm, gated=True, narrow=dtype)
    assert off(got, gated(normed @ exact.T)) < TOLERANCE


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", [0, 16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_fit_into_shared_memory(bits: int, group: int, minima: bool) -> None:
    for inputs, gated in itertools.product((64, 4096, 14336, 20480), (False, True)):
        form = RowForm(gated, normed=True, biased=False, added=False, x_float=False, out_float=False)
        packed_as = Form(bits, group or (inputs if minima else 0), minima)
        plan = fragments.ring_plan(packed_as, gated=gated)
        _, macros, threads, shared = fragments.row_source(packed_as, torch.bfloat16, 64, inputs, form, plan)
        assert threads <= 1024
        assert macros["DEPTH"] >= 2
        assert shared + STATIC <= LARGEST_BLOCK


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ONE_ROW)
def test_one_row_by_blocks_that_copy_ahead(form: str, dtype: torch.dtype) -> None:
    """With all operations beside each other, and several divisions into warps."""
    matrix, exact = random_matrix(ONE_ROW[form], dtype)
    scale, bias = torch.rand(matrix.inputs).to(dtype), torch.randn(matrix.outputs).to(dtype)
    norm = (scale.to(GPU), 1e-5)
    compile_rows(matrix, dtype)
    for wide_x, wide_out in itertools.product((False, True), repeat=2):
        x = torch.randn(1, matrix.inputs).to(torch.float32 if wide_x else dtype)
        made = torch.float32 if wide_out else dtype
        stream, wide = torch.randn(1, matrix.outputs).to(made), x.double()
        normed = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * scale.double()
        for plan in PLANS if wide_x == wide_out else PLANS[:1]:
            product = partial(fragments.row_product, x.to(GPU), matrix, narrow=dtype, plan=plan)
            limit = 1e-3 if wide_out and (wide_x or dtype == torch.float16) else 4e-3
            assert off(product(dtype=made), wide @ exact.T) < limit
            assert off(product(norm=norm, bias=bias.to(GPU), dtype=made), normed @ exact.T + bias.double()) < limit
            target = stream.to(GPU, copy=True)
            assert product(bias=bias.to(GPU), add_to=target) is target
            assert off(target, wide @ exact.T + bias.double() + stream.double()) < limit
            gate, up = (normed @ exact.T + bias.double()).chunk(2, 1)
            got = product(norm=norm, bias=bias.to(GPU), gated=True, dtype=made)
            assert off(got, F.silu(gate) * up) < limit
            gate, up = (wide @ exact.T).chunk(2, 1)
            assert off(product(gated=True, dtype=made), F.silu(gate) * up) < limit


def compile_rows(matrix: Fragments, dtype: torch.dtype) -> None:
    """Compile what the test above launches, on all cores."""
    form = fragments.form_of(matrix)
    operations = ((0, 0, 0, 0), (0, 1, 1, 0), (0, 0, 1, 1), (1, 1, 1, 0), (1, 0, 0, 0))
    for wide_x, wide_out in itertools.product((False, True), repeat=2):
        for plan, names in itertools.product(PLANS if wide_x == wide_out else PLANS[:1], operations):
            fused = RowForm(*map(bool, names), wide_x, wide_out)
            plan = plan or fragments.ring_plan(form, gated=fused.gated)
            nvrtc.compile_ahead(*fragments.row_source(form, dtype, matrix.outputs, matrix.inputs, fused, plan)[:2])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", [Form(4, 128, False), Form(4, 32, True), Form(8, 0, False), Form(8, 16, True)])
def test_blocks_of_several_rows_fit_into_shared_memory(form: Form, gated: bool) -> None:
    for inputs, rows in itertools.product((64, 4096, 8192, 14336, 20480), COLUMNS):
        division = few_fragments._division(form, inputs, rows, gated=gated)
        if division is None:
            assert gated, "others are divided"
            continue
        parts, plan = division
        fused = rows_alone(rows, gated=gated)
        _, macros, threads, shared = fragments.row_source(form, torch.bfloat16, 64, inputs, fused, plan, parts)
        assert threads <= 1024
        assert macros["DEPTH"] >= 2
        assert shared + fused.sum_bytes + 1024 <= LARGEST_BLOCK


@on_hopper
@pytest.mark.parametrize("of", [(4, 128, True), (8, 0, False), ("e4m3", 32, False), ("table", 64, False)], ids=str)
def test_several_long_rows_in_parts(of: tuple[int | str, int, bool]) -> None:
    matrix, exact = random_matrix((*of, 320, 14336), torch.bfloat16)
    for rows in (3, 8):
        x, bias = torch.randn(rows, 14336).bfloat16(), torch.randn(320).bfloat16()
        got = few_fragments.product(x.to(GPU), matrix, bias=bias.to(GPU), dtype=torch.float32)
        assert off(got, x.double() @ exact.T + bias.double()) < 1e-3


@on_hopper
@pytest.mark.parametrize("form", ["w4a16", "w8a16"])
def test_several_rows_wait_for_the_launch_before(form: str) -> None:
    """In a recorded step, a launch begins while the previous one runs."""
    size, inner = 2048, 8704
    pack = ONLINE[form].pack
    layers = []
    for _ in range(4):
        up, down = torch.randn(2 * inner, size, device=GPU), torch.randn(size, inner, device=GPU)
        layers.append((pack([up.bfloat16() / size**0.5]), pack([down.bfloat16() / inner**0.5])))
    start = torch.randn(8, size, device=GPU).bfloat16()
    stream = start.clone()

    def step(between: Callable[[], None]) -> None:
        stream.copy_(start)
        for up, down in layers:
            wide = few_fragments.product(stream, up, gated=True)
            between()
            few_fragments.product(wide, down, add_to=stream)
            between()

    check_overlap(step, stream)


@on_hopper
def test_magnitudes_of_a_row() -> None:
    """The units take float16: rows of zeros, and of numbers that it has not."""
    matrix, exact = packed_on_gpu("4 bits, groups of 128")
    assert not fragments.row_product(torch.zeros(1, 1024, device=GPU).bfloat16(), matrix, narrow=torch.bfloat16).any()
    for power in (-100, -20, 20, 100):
        x = (torch.randn(1, 1024) * 2.0**power).bfloat16()
        got = fragments.row_product(x.to(GPU), matrix, dtype=torch.float32, narrow=torch.bfloat16)
        assert off(got, x.double() @ exact.T) < 1e-3


@on_hopper
def test_inputs_in_the_order_of_activations() -> None:
    matrix, exact = packed_on_gpu("4 bits, groups of 64 with minima")
    order = torch.randperm(matrix.inputs)
    matrix = replace(matrix, order=order.int().to(GPU))
    assert not fragments.fuses(matrix)
    for rows in (1, 40):
        x = torch.randn(rows, matrix.inputs).bfloat16()
        got = packed.product(x.to(GPU), matrix, None, torch.float32)
        assert off(got, x.double() @ exact[:, order.argsort()].T) < TOLERANCE


@on_hopper
@pytest.mark.parametrize("method", ["w4a16", "w8a16"])
def test_layers_use_these_kernels(method: str) -> None:
    weights = [torch.randn(size, 256) / 16 for size in (128, 64, 64)]
    layer = PackedOnGpu(torch.bfloat16, GPU, online=ONLINE[method])
    layer.prepare([{"weight": weight.to(GPU, torch.bfloat16)} for weight in weights])
    assert isinstance(layer.matrix, Fragments)
    limit = 0.2 if method == "w4a16" else 0.05
    assert layer.fused_rows == 1
    for rows in (1, 5, 300):
        x, stream = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 256).bfloat16()
        expected = x.double() @ torch.cat(weights).double().T
        assert off(layer.apply(x.to(GPU)), expected) < limit
        assert off(layer.gated(x.to(GPU)), gated(expected)) < 2 * limit
        assert off(left_to(layer, stream, x), expected + stream.double()) < limit


def left_to(layer: PackedOnGpu, stream: Tensor, x: Tensor) -> Tensor:
    """Return the stream with a layer's product, which kernels of few rows add themselves."""
    total = stream.to(GPU, copy=True)
    parts = layer.leave(total, x.to(GPU))
    assert (parts is None) == (1 < len(x) <= MOST_ROWS)
    return total.float() if parts is None else total.float() + parts.float().sum(0)


@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 0])
def test_the_smallest_floats(group: int, dtype: torch.dtype) -> None:
    """E4M3 without an exponent, which sums of random ones would hide; in bfloat16 their bits are subnormal, too."""
    blocks = codes_of("e4m3", group, 128, 256)
    blocks.values.copy_(torch.randint(0, 8, (128, 256)) | torch.randint(0, 2, (128, 256)) << 7)
    matrix, exact = pack_numbers([blocks], GPU, dtype), value_of(blocks)
    assert isinstance(matrix, Fragments)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 256).to(dtype)
        assert off(packed.product(x.to(GPU), matrix, None, torch.float32), x.double() @ exact.T) < TOLERANCE


@on_hopper
@pytest.mark.parametrize(("kind", "form"), [("e4m3", "E4M3"), ("table", "4-bit codes")])
def test_layers_of_codes_use_these_kernels(kind: str, form: str) -> None:
    parts = [codes_of(kind, 64, size, 256) for size in (128, 64, 64)]
    parts = [replace(part, book=parts[0].book) for part in parts]
    exact, biases = torch.cat([value_of(part) for part in parts]), [torch.randn(size) for size in (128, 64, 64)]
    layer, biased = (PackedOnGpu(torch.bfloat16, GPU) for _ in range(2))
    layer.prepare([{"weight": part} for part in parts])
    biased.prepare(
        [{"weight": part, "bias": bias.to(GPU, torch.bfloat16)} for part, bias in zip(parts, biases, strict=True)]
    )
    assert isinstance(layer.matrix, Fragments)
    assert (layer.packed_as, layer.fused_rows) == (form, 1)
    assert layer.nbytes < 1.1 * sum(part.values.numel() for part in parts) * (1 if kind == "e4m3" else 0.6)
    for rows in (1, 5, 300):
        x, stream = torch.randn(rows, 256).bfloat16(), torch.randn(rows, 256).bfloat16()
        expected = x.double() @ exact.T
        assert off(layer.apply(x.to(GPU)), expected) < TOLERANCE
        assert off(biased.apply(x.to(GPU)), expected + torch.cat(biases).bfloat16().double()) < TOLERANCE
        assert off(layer.gated(x.to(GPU)), gated(expected)) < TOLERANCE
        assert off(left_to(layer, stream, x), expected + stream.double()) < TOLERANCE


@on_hopper
def test_other_codes_have_other_kernels() -> None:
    for blocks in (codes_of("e5m2", 64, 128, 128), codes_of("table", 32, 96, 128), codes_of("e4m3", 32, 128, 96)):
        assert isinstance(pack_numbers([blocks], GPU, torch.bfloat16), words.Words)
    wide = pack_numbers([codes_of("table", 64, 128, 128)], GPU, torch.float32)
    assert isinstance(wide, words.Words)


@on_hopper
def test_other_sizes_have_other_kernels() -> None:
    blocks = blocks_of(4, 32, False, 96, 96)
    assert not isinstance(pack_integers([blocks], GPU, torch.bfloat16), Fragments)
    blocks = blocks_of(4, 64, False, 128, 128)
    assert not isinstance(pack_integers([blocks], GPU, torch.float32), Fragments)
