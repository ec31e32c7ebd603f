"""Products with packed matrices against float64; on the GPU or under the interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch

pytest.importorskip("triton")

from gguf import GGMLQuantizationType as Kind
from quantized_kit import EXAMPLES, blocks_of, codes_of, value_of
from torch import Tensor
from torch.nn import functional as F

from octavo.models.load.gguf_blocks import as_blocks
from octavo.models.load.quantized.table import dequantizing, rounds_activations
from octavo.models.load.tensors import TensorCheckpoint
from octavo.nn.delta import Addition, Delta
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.ops import floats, packed, words
from octavo.nn.ops.triton_sum import sum_parts
from octavo.nn.quant.base import Part
from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.codes import INTEGERS
from octavo.nn.quant.integers import as_integers
from octavo.nn.quant.online import ONLINE
from octavo.nn.quant.packed_gpu import PackedOnGpu
from octavo.nn.quant.words import pack_codes, pack_words, unpack_words
from octavo.nn.rounded import Rounded
from octavo.nn.shard import NONE
from octavo.nn.stream import Stream
from octavo.nn.weights import Codebook, QuantizedBlocks

GPU = torch.cuda.is_available()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # the interpreter multiplies bfloat16 matrices by their bits
TOLERANCE = 1e-2 if GPU else 1e-5
# Bits, group, minima; outputs, inputs. Inputs of an odd number of groups; blocks that are filled up; whole columns.
FORMS = {
    "4 bits, groups of 128": (4, 128, False, 40, 1024),
    "4 bits, groups of 64 with minima": (4, 64, True, 48, 320),
    "4 bits, groups of 32": (4, 32, False, 34, 96),
    "4 bits, whole columns": (4, 0, True, 33, 512),
    "8 bits, groups of 128": (8, 128, True, 48, 384),
    "8 bits, groups of 32": (8, 32, False, 20, 160),
    "8 bits, whole columns": (8, 0, False, 48, 256),
    "8 bits, groups of 16 with minima": (8, 16, True, 32, 96),
}
ROWS = [1, 2, 7, 16, 33, 64, 257] if GPU else [1, 7, 33]


ALL_ROWS = [1, 2, 7, 16, 33, 64, 257]
# Codes, group; outputs, inputs. Also groups that are no powers of two, and more inputs of a group than of a block.
CODES = {
    "a table, groups of 64": ("table", 64, 48, 320),
    "a table, groups of 128": ("table", 128, 33, 1024),
    "a table, groups of 48": ("table", 48, 17, 288),
    "a table, groups of 512": ("table", 512, 16, 1536),
    "a table, whole columns": ("table", 0, 40, 160),
    "E4M3, groups of 32": ("e4m3", 32, 48, 160),
    "E4M3, groups of 128": ("e4m3", 128, 33, 384),
    "E4M3, whole columns": ("e4m3", 0, 20, 96),
    "E5M2, groups of 64": ("e5m2", 64, 48, 320),
    "E5M2, groups of 16": ("e5m2", 16, 17, 224),
}
CODE_FORMS = {"table": "4-bit codes", "e4m3": "E4M3", "e5m2": "E5M2"}


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", FORMS)
def test_packed_integers_are_multiplied_by_any_number_of_rows(form: str) -> None:
    blocks = blocks_of(*FORMS[form])
    exact, matrix = value_of(blocks), pack_words([blocks], DEVICE)
    assert off(unpack_words(matrix), exact) < 1e-6
    wide = torch.full((matrix.outputs, matrix.inputs), float("nan"), device=DEVICE)
    assert off(words.widen(matrix, wide), exact) < 1e-6
    bias = torch.randn(matrix.outputs)
    for rows in ROWS:
        x = torch.randn(rows, matrix.inputs).to(DTYPE)
        expected = x.double() @ exact.T
        got = packed.product(x.to(DEVICE), matrix, bias.to(DEVICE, DTYPE), torch.float32)
        assert off(got, expected + bias.to(DTYPE).double()) < TOLERANCE
        parts = packed.parts(x.to(DEVICE), matrix)
        assert (parts is None) == (rows > packed.FEW_WORDS)
        if parts is not None:
            assert off(parts.sum(0), expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [DTYPE, torch.float16], ids=str)
@pytest.mark.parametrize("form", CODES)
def test_packed_codes_are_multiplied_by_any_number_of_rows(form: str, dtype: torch.dtype) -> None:
    kind, group, outputs, inputs = CODES[form]
    blocks = codes_of(kind, group, outputs, inputs)
    exact, layer = value_of(blocks), PackedOnGpu(dtype, DEVICE)
    layer.prepare([{"weight": blocks}])
    matrix = layer.matrix
    assert isinstance(matrix, words.Words)
    assert layer.packed_as == CODE_FORMS[kind]
    # Scales and numbers of tables have the precision of float16.
    limit = max(TOLERANCE, 1e-3 if kind == "table" else 0.0)
    assert off(unpack_words(matrix), exact) < (limit if kind == "table" else 1e-6)
    wide = torch.full((outputs, inputs), float("nan"), device=DEVICE)
    assert off(words.widen(matrix, wide), exact) < (limit if kind == "table" else 1e-6)
    bias = torch.randn(outputs).to(DTYPE)
    for rows in ALL_ROWS if dtype == DTYPE else ALL_ROWS[1:2]:
        x = torch.randn(rows, inputs).to(dtype)
        got = packed.product(x.to(DEVICE), matrix, bias.to(DEVICE), torch.float32)
        assert off(got, x.double() @ exact.T + bias.double()) < limit


@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
def test_sums_of_parts_are_gated(dtype: torch.dtype) -> None:
    """More elements than one program handles; rows begin in the middle of a program's block."""
    parts, bias = torch.randn(3, 7, 2 * 200), torch.randn(2 * 200)
    for added in (None, bias):
        gate, up = (parts.double().sum(0) + (0 if added is None else added.double())).chunk(2, 1)
        given = None if added is None else added.to(DEVICE)
        got = sum_parts(parts.to(DEVICE), given, dtype, gated=True)
        assert got.dtype == dtype
        assert off(got, F.silu(gate) * up) < TOLERANCE
        assert off(sum_parts(parts.to(DEVICE), given, dtype), torch.cat([gate, up], 1)) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 20, packed.FEW_WORDS + 1])
def test_codes_beside_an_adapter_and_a_residual_stream(rows: int) -> None:
    parts = [codes_of("table", 64, size, 320) for size in (32, 16)]
    parts[1] = replace(parts[1], book=parts[0].book)
    exact = torch.cat([value_of(part) for part in parts])
    layer = Linear("", DEVICE, [Part("q", 320, 32), Part("k", 320, 16)], NONE, PackedOnGpu(DTYPE, DEVICE))
    layer.place(parts)
    assert layer.packed_as == "4-bit codes"
    x, value = torch.randn(rows, 320).to(DTYPE), torch.randn(rows, 48).to(DTYPE)
    expected = value.double() + x.double() @ exact.T
    limit = max(TOLERANCE, 1e-3)
    stream = Stream(value.to(DEVICE, copy=True))
    layer.into(stream, x.to(DEVICE))
    assert off(stream.total().float(), expected) < limit
    layer.delta = Doubled()
    added = x.double().sum(1, keepdim=True)
    assert off(layer(x.to(DEVICE)), expected - value.double() + added) < limit
    stream = Stream(value.to(DEVICE, copy=True))
    layer.into(stream, x.to(DEVICE))
    assert off(stream.total().float(), expected + added) < limit


def test_scales_of_codes_keep_their_precision() -> None:
    """In the smallest dtype that has it: powers of two in bfloat16; of floats no other than float32."""
    for kind, factor, dtype in (("e4m3", 2.0**-40, torch.bfloat16), ("table", 1e-9, torch.float32)):
        blocks = codes_of(kind, 32, 16, 96)
        scales = torch.ones_like(blocks.scales) if dtype == torch.bfloat16 else blocks.scales
        matrix = pack_codes([replace(blocks, scales=scales * factor)], DEVICE)
        assert matrix is not None
        assert matrix.scales.dtype == dtype
        assert off(unpack_words(matrix), value_of(replace(blocks, scales=scales * factor))) < 1e-3
    for kind, dtype in (("table", torch.float16), ("e5m2", torch.float32)):
        matrix = pack_codes([codes_of(kind, 32, 16, 96)], DEVICE)
        assert matrix is not None
        assert matrix.scales.dtype == dtype
    large = Codebook("table", torch.arange(16) * 1e5)
    assert pack_codes([replace(codes_of("table", 32, 16, 96), book=large)], DEVICE) is None


def test_columns_are_multiplied_in_the_order_of_activations() -> None:
    blocks = blocks_of(4, 64, False, 48, 320)
    matrix, order = pack_words([blocks], DEVICE), torch.randperm(320)
    matrix = replace(matrix, order=order.int().to(DEVICE))
    exact = value_of(blocks)[:, order.argsort()]
    for rows in (1, 20, packed.FEW_WORDS + 1):
        x = torch.randn(rows, 320).to(DTYPE)
        assert off(packed.product(x.to(DEVICE), matrix, None, torch.float32), x.double() @ exact.T) < TOLERANCE


def check_fusion(matrix: floats.Floats, exact: Tensor) -> None:
    x, scale = torch.randn(1, matrix.inputs).to(DTYPE), torch.randn(matrix.inputs).to(DTYPE)
    bias, stream = (torch.randn(matrix.outputs).to(DTYPE) for _ in range(2))
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()
    gate, up = (normed @ exact.T).chunk(2, -1)
    got = floats.row_product(x.to(DEVICE), matrix, norm=(scale.to(DEVICE), 1e-5), gated=True)
    assert off(got, F.silu(gate) * up) < TOLERANCE
    target = stream[None].to(DEVICE, copy=True)
    assert floats.row_product(x.to(DEVICE), matrix, bias=bias.to(DEVICE), add_to=target) is target
    assert off(target, wide @ exact.T + bias.double() + stream.double()) < TOLERANCE


def in_tiles(outputs: int, inputs: int) -> floats.Floats:
    """Random numbers with a scale for each tile of 128 x 128."""
    codes = (torch.randn(outputs, inputs, device=DEVICE) * 100).clamp(-448, 448).to(floats.DTYPE)
    scales = (torch.rand(-(-outputs // 128), -(-inputs // 512) * 4, device=DEVICE) + 0.5) / (100 * inputs**0.5)
    return floats.Floats(codes, scales)


MATRICES = {
    "E4M3": lambda: floats.rounded(torch.randn(48, 96, device=DEVICE) / 10),
    "E4M3, longer rows": lambda: floats.rounded(torch.randn(48, 1024, device=DEVICE) / 32),
    "E5M2": lambda: floats.Floats(
        torch.randn(48, 96, device=DEVICE).to(torch.float8_e5m2), torch.rand(48, device=DEVICE) + 0.5
    ),
    "integers": lambda: floats.rounded(torch.randn(48, 96, device=DEVICE) / 10, torch.int8),
    "tiles": lambda: in_tiles(256, 320),
    "tiles, the last output's cut": lambda: in_tiles(144, 640),
}


@pytest.mark.parametrize("form", MATRICES)
def test_packed_floats_are_multiplied_by_any_number_of_rows(form: str) -> None:
    matrix = MATRICES[form]()
    exact = matrix.values().cpu().double()
    if form != "tiles, the last output's cut":
        check_fusion(matrix, exact)
    bias = torch.randn(matrix.outputs).to(DTYPE)
    for rows in ROWS:
        x = torch.randn(rows, matrix.inputs).to(DTYPE)
        expected = x.double() @ exact.T + bias.double()
        # Activations of more rows are rounded to three bits of mantissa: at most 1/16, evenly spread.
        limit = TOLERANCE if rows <= packed.FEW_FLOATS else 0.05
        assert off(packed.product(x.to(DEVICE), matrix, bias.to(DEVICE), torch.float32), expected) < limit
        parts = packed.parts(x.to(DEVICE), matrix)
        if parts is not None:
            assert off(parts.sum(0), expected - bias.double()) < TOLERANCE


@pytest.mark.parametrize("dtype", floats.LARGEST, ids=str)
def test_rows_are_rounded_to_nearest(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96).to(DTYPE)
    made = floats.round_rows(x.to(DEVICE), dtype)
    codes, scales = made.codes, made.scales
    torch.testing.assert_close(scales.cpu()[:, 0], x.float().abs().amax(1) / floats.LARGEST[dtype])
    expected = x.float() / scales.cpu()
    expected = (expected if dtype.is_floating_point else expected.round()).to(dtype).float()
    # The quotient may be rounded otherwise.
    step = expected.abs() / 8 if dtype.is_floating_point else torch.ones(())
    assert ((codes.cpu().float() - expected).abs() <= step).all()
    assert (codes.cpu().float() != expected).float().mean() < 0.01


def test_groups_of_a_row_have_scales_of_their_own() -> None:
    x = torch.randn(5, 320).to(DTYPE)
    made = floats.round_groups(x.to(DEVICE))
    assert made.scales.shape == (8, 3)
    assert made.scales.stride() == (1, 8)
    scales = made.scales[:5].cpu().repeat_interleave(128, 1)[:, :320]
    groups = torch.nn.functional.pad(x.float(), (0, 64)).view(5, 3, 128)
    torch.testing.assert_close(made.scales[:5].cpu(), groups.abs().amax(2) / 448)
    assert off(made.codes[:5].cpu().float() * scales, x.double()) < 0.04


class Doubled(Delta):
    """Adds the input's product with ones."""

    fused_rows = 1

    def begin(self, x: Tensor) -> Addition:
        class Sum(Addition):
            def add_to(self, y: Tensor) -> None:
                y += x.sum(1, keepdim=True)

        return Sum()


@pytest.mark.parametrize("scheme", ONLINE)
def test_matrices_are_quantized_when_they_are_loaded(scheme: str) -> None:
    weights = [torch.randn(size, 256) / 16 for size in (32, 16, 16)]
    layer = PackedOnGpu(DTYPE, DEVICE, online=ONLINE[scheme])
    layer.prepare([{"weight": weight.to(DEVICE, DTYPE)} for weight in weights])
    assert layer.nbytes < 64 * 256 * (0.6 if scheme == "w4a16" else 1.1)
    whole, limit = torch.cat(weights).double(), 0.2 if scheme == "w4a16" else 0.05
    for rows in (1, 5, 40):
        x = torch.randn(rows, 256).to(DTYPE)
        expected = x.double() @ whole.T
        assert off(layer.apply(x.to(DEVICE)), expected) < limit
        assert off(layer.wide(x.to(DEVICE)), expected) < limit
        gate, up = expected.chunk(2, -1)
        assert off(layer.gated(x.to(DEVICE)), F.silu(gate) * up) < 2 * limit
        stream = torch.randn(rows, 64).to(DTYPE)
        total = stream.to(DEVICE, copy=True)
        parts = layer.leave(total, x.to(DEVICE))
        got = total.float() if parts is None else total.float() + parts.float().sum(0)
        assert off(got, expected + stream.double()) < limit
    x = torch.randn(1, 256).to(DTYPE)
    if layer.fused_rows:
        got = layer.fused(x.to(DEVICE), delta=Doubled())
        assert off(got, x.double() @ whole.T + x.double().sum()) < limit


def test_a_matrix_that_cannot_be_quantized_stays_plain() -> None:
    layer = PackedOnGpu(DTYPE, DEVICE, online=ONLINE["w4a16"])
    weight = torch.randn(32, 40)
    layer.prepare([{"weight": weight.to(DEVICE, DTYPE)}])
    assert layer.matrix is None
    x = torch.randn(3, 40).to(DTYPE)
    assert off(layer.apply(x.to(DEVICE)), x.double() @ weight.to(DTYPE).double().T) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.packs or example.codes])
def test_formats_of_checkpoints_stay_packed(name: str) -> None:
    """Whole, and the slices that ranks of tensor parallelism read."""
    stored, exact = EXAMPLES[name].write(torch.randn(48, 256) / 16)
    tensors = {f"a.{suffix}": tensor for suffix, tensor in stored.items()}
    view = dequantizing(TensorCheckpoint(tensors), settings_of(name))
    blocks = view.blocks("a.weight", codes=EXAMPLES[name].codes)
    assert blocks is not None
    for index in ((slice(0, 48), slice(0, 256)), (slice(16, 32), slice(0, 256)), (slice(0, 48), slice(128, 256))):
        if not blocks.divides(index):
            assert blocks.order is not None, "only inputs in the order of activations can't be divided"
            continue
        layer = PackedOnGpu(DTYPE, DEVICE)
        layer.prepare([{"weight": blocks.part(index)}])
        assert layer.matrix is not None
        values = exact[index]
        x = torch.randn(3, values.shape[1]).to(DTYPE)
        # A minimum has the precision of float16.
        assert off(layer.apply(x.to(DEVICE)), x.double() @ values.T) < max(TOLERANCE, 2e-3)


def settings_of(name: str) -> dict[str, Any]:
    return {"quantization_config": EXAMPLES[name].settings}


EIGHT_BITS = ("fp8-tensor", "fp8-channel", "fp8-tiles", "fp8-e5m2", "fp8-modelopt", "fp8-compressed", "w8a8")
EIGHT_BITS += ("fp8-static", "fp8-compressed-static", "fp8-modelopt-static")


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_checkpoints_whose_activations_have_8_bits(name: str) -> None:
    """Two projections, fused; and the slices that ranks of tensor parallelism read."""
    written = [EXAMPLES[name].write(torch.randn(size, 512) / 16) for size in (256, 144)]
    tensors = {f"{i}.{suffix}": tensor for i, (stored, _) in enumerate(written) for suffix, tensor in stored.items()}
    view = dequantizing(TensorCheckpoint(tensors), settings_of(name))
    parts = [view.blocks(f"{i}.weight", codes=True) for i in range(2)]
    exact = torch.cat([values for _, values in written])
    for index in ((slice(None), slice(None)), (slice(0, 128), slice(None)), (slice(None), slice(256, 512))):
        layer = PackedOnGpu(DTYPE, DEVICE, rounds=rounds_activations(settings_of(name)))
        assert layer.takes_codes
        cut = [None if part is None else part.part(index) for part in parts]
        assert all(one is not None for one in cut)
        layer.prepare([{"weight": one} for one in cut if one is not None])
        assert isinstance(layer.matrix, floats.Floats)
        assert layer.nbytes < 1.1 * sum(one.values.numel() for one in cut if one is not None)
        values = torch.cat([part[index] for part in exact.split([256, 144])])
        for rows, limit in ((1, TOLERANCE), (3, TOLERANCE), (40, 0.05)):
            x = torch.randn(rows, values.shape[1]).to(DTYPE)
            assert off(layer.apply(x.to(DEVICE)), x.double() @ values.T) < max(limit, 2e-3)


@pytest.mark.parametrize("name", ["w8a16", "fp8-weights", "nvfp4", "gptq-8"])
def test_other_activations_stay_as_they_are(name: str) -> None:
    settings = dict(EXAMPLES.get(name, EXAMPLES["fp8-compressed"]).settings)
    if name == "fp8-weights":
        group = {"weights": {"num_bits": 8, "type": "float"}, "input_activations": None}
        settings["config_groups"] = {"group_0": group}
    assert not rounds_activations({"quantization_config": settings})


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_codes_that_are_multiples_of_a_number_become_integers(name: str) -> None:
    stored, exact = EXAMPLES[name].write(torch.randn(48, 256) / 16)
    tensors = {f"a.{suffix}": tensor for suffix, tensor in stored.items()}
    codes = dequantizing(TensorCheckpoint(tensors), settings_of(name)).blocks("a.weight", codes=True)
    assert codes is not None
    layer = PackedOnGpu(DTYPE, DEVICE)
    layer.prepare([{"weight": codes}])
    assert layer.packed_as == "8-bit integers"
    x = torch.randn(3, 256).to(DTYPE)
    assert off(layer.apply(x.to(DEVICE)), x.double() @ exact.T) < max(TOLERANCE, 2e-3)


HALVES = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_XS: (0,)}
"""Type of GGUF -> places of a block's float16 numbers."""


@pytest.mark.parametrize(
    ("kinds", "form"), [((Kind.Q4_K, Kind.Q6_K), " with minima"), ((Kind.IQ4_XS,), "")], ids=["mixed", "IQ4_XS"]
)
def test_types_of_gguf_without_kernels_become_integers(kinds: tuple[Kind, ...], form: str) -> None:
    """Also projections of one layer in two types, as files of Q4_K_M have them."""
    parts, exact = [], []
    for kind in kinds:
        raw = torch.randint(0, 256, (32, gguf.GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
        for place in HALVES[kind]:
            raw[:, place : place + 2] = ((torch.rand(32, 1) + 0.5) / 1000).half().view(torch.uint8)
        parts.append(as_blocks(raw, kind))
        exact.append(torch.from_numpy(gguf.quants.dequantize(raw.numpy(), kind)).double())
    layer = PackedOnGpu(DTYPE, DEVICE)
    layer.prepare([{"weight": part} for part in parts if part is not None])
    assert layer.packed_as == f"8-bit integers{form}"
    x = torch.randn(3, 256).to(DTYPE)
    assert off(layer.apply(x.to(DEVICE)), x.double() @ torch.cat(exact).T) < max(TOLERANCE, 2e-3)


def test_scales_that_float16_lacks_keep_a_matrix_plain() -> None:
    codes = torch.randint(0, 64, (32, 64), dtype=torch.uint8)
    for scale in (1e-7, 1e6):
        part = QuantizedBlocks(codes, torch.full((32, 4), scale), None, 0, 6, book=INTEGERS)
        assert as_integers([part], CPU) is None
    part = QuantizedBlocks(codes, torch.full((32, 4), 0.25), None, 0, 6, book=INTEGERS)
    (made,) = as_integers([part], CPU) or []
    torch.testing.assert_close(dequantized(made, torch.float32), dequantized(part, torch.float32))


def test_codes_of_other_forms_are_expanded() -> None:
    """As with fused projections of different formats."""
    weights = [torch.randn(128, 256) / 16 for _ in range(2)]
    parts, exact = [], []
    for name, weight in zip(("fp8-channel", "bnb-nf4"), weights, strict=True):
        stored, values = EXAMPLES[name].write(weight)
        tensors = {f"a.{suffix}": tensor for suffix, tensor in stored.items()}
        view = dequantizing(TensorCheckpoint(tensors), settings_of(name))
        parts.append(view.blocks("a.weight", codes=True))
        exact.append(values)
    layer = PackedOnGpu(DTYPE, DEVICE, rounds=True)
    layer.prepare([{"weight": part} for part in parts if part is not None])
    assert layer.matrix is None
    x = torch.randn(3, 256).to(DTYPE)
    assert off(layer.apply(x.to(DEVICE)), x.double() @ torch.cat(exact).T) < TOLERANCE


@pytest.mark.parametrize("method", ["fp8", "w8a8"])
@pytest.mark.parametrize("rows", [packed.FEW_LEFT + 1, pytest.param(150, marks=pytest.mark.slow)])
def test_activations_are_rounded_by_the_operation_before_the_product(rows: int, method: str) -> None:
    """The norm, with what it adds to the stream, and the gate; through the layers that call them."""
    size = 64
    up = Linear("", DEVICE, [Part("gate", size, 48), Part("up", size, 48)], NONE, scheme(method), gates=True)
    down = Linear("", DEVICE, [Part("down", 48, size)], NONE, scheme(method))
    weights = [torch.randn(48, size) / 8, torch.randn(48, size) / 8, torch.randn(size, 48) / 7]
    up.place([weight.to(DEVICE, DTYPE) for weight in weights[:2]])
    down.place([weights[2].to(DEVICE, DTYPE)])
    norm = RMSNorm("", DEVICE, DTYPE, size, 1e-5)
    norm.place([torch.rand(size).to(DEVICE, DTYPE)])
    value, added = (torch.randn(rows, size).to(DTYPE) for _ in range(2))
    for pending in ("nothing", "an output", "parts"):
        stream = Stream(value.to(DEVICE))
        if pending == "an output":
            stream.add_later(added.to(DEVICE, copy=True))
        elif pending == "parts":
            stream.add_parts_later(torch.stack([added / 2, added / 2]).to(DEVICE))
        total = value.double() + (0 if pending == "nothing" else added.double())
        inner = up.gated_after_norm(stream, norm, down)
        assert isinstance(inner, Rounded)
        assert off(stream.value, total) < TOLERANCE
        normed = total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.weight.cpu().double()
        gate, other = (normed @ torch.cat(weights[:2]).double().T).chunk(2, 1)
        expected = F.silu(gate) * other
        assert off(inner.codes.float() * inner.scales, expected) < 0.1
        down.into(stream, inner)
        assert off(stream.total().float(), total + expected @ weights[2].double().T) < 0.1
    up.delta = Doubled()  # which needs them unrounded
    assert isinstance(up.gated_after_norm(Stream(value.to(DEVICE)), norm, down), Tensor)


def scheme(method: str) -> PackedOnGpu:
    return PackedOnGpu(DTYPE, DEVICE, online=ONLINE[method])
