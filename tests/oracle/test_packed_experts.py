"""Products with packed experts on a GPU against float64; on the GPU or under the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import hopper
from quantized_kit import BNB_TABLES, blocks_of, codes_of, value_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.models.load.quantized.codes import FLOATS
from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops import floats, packed_expert_tiles, packed_experts
from octavo.nn.ops.expert_products import linear, mix_stacked, mix_tiles, route_on_device, tilings_for
from octavo.nn.ops.expert_rows import add_rows, gate_rows
from octavo.nn.ops.expert_weights import PackedMatrices, StackedWeights
from octavo.nn.ops.experts import mix_reference
from octavo.nn.ops.routing import Routing
from octavo.nn.quant.gpu_packed_experts import ExpertMatrices, PackedStack
from octavo.nn.quant.pack_experts import PackedMatrix, from_floats, pack_expert, put, refined, stacked
from octavo.nn.weights import E2M1, Codebook, QuantizedBlocks

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies bfloat16 matrices by their bits
TOLERANCE = 1e-2 if GPU else 3e-3
ROUNDED = 0.05
"""Largest error with rows rounded to 8 bits."""
TOKENS = (2, 9, 40, 700) if GPU else (2, 9, 20)
"""One by one; unrounded; rounded; with tiles for many rows."""
EIGHT_BITS = {"e4m3": floats.DTYPE, "e5m2": torch.float8_e5m2}
Pack = Callable[[int, int], tuple[PackedMatrix | None, Tensor]]


def integers(bits: int, group: int, minima: bool) -> Pack:
    def pack(outputs: int, inputs: int) -> tuple[PackedMatrix | None, Tensor]:
        blocks = blocks_of(bits, group, minima, outputs, inputs)
        return pack_expert([blocks], DEVICE, rounds=False), value_of(blocks)

    return pack


def codes(book: str, group: int, *, rounds: bool = False, tiled: bool = False) -> Pack:
    def pack(outputs: int, inputs: int) -> tuple[PackedMatrix | None, Tensor]:
        size = group or inputs
        scales = 2.0 ** torch.randint(-6, -3, (outputs, inputs // size)).float()
        dtype = EIGHT_BITS.get(book)
        if dtype is not None:
            scales = scales * (1 + torch.rand_like(scales))
            if tiled:
                scales = scales[::128].repeat_interleave(128, 0)
            values = (torch.randn(outputs, inputs) * 4).clamp(-448, 448).to(dtype).view(torch.uint8)
        else:
            values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        kind = E2M1 if dtype is None else FLOATS[dtype]
        blocks = QuantizedBlocks(values, scales, None, 0, kind.bits, book=kind)
        exact = kind.of(values).double() * scales.double().repeat_interleave(size, 1)
        return pack_expert([blocks], DEVICE, rounds=rounds), exact

    return pack


def table(name: str, group: int) -> Pack:
    def pack(outputs: int, inputs: int) -> tuple[PackedMatrix | None, Tensor]:
        values = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        scales = (torch.rand(outputs, inputs // (group or inputs)) + 0.5) / inputs**0.5
        blocks = QuantizedBlocks(values, scales, None, 0, 4, book=Codebook("table", BNB_TABLES[name]))
        return pack_expert([blocks], DEVICE, rounds=False), value_of(blocks)

    return pack


def rounding(dtype: torch.dtype) -> Pack:
    def pack(outputs: int, inputs: int) -> tuple[PackedMatrix | None, Tensor]:
        made = floats.rounded(torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5, dtype)
        return from_floats(made), made.values().double().cpu()

    return pack


FORMS: dict[str, Pack] = {
    "4 bits, groups of 128": integers(4, 128, False),
    "4 bits, groups of 32 with minima": integers(4, 32, True),
    "4 bits, whole rows": integers(4, 0, False),
    "8 bits, groups of 64": integers(8, 64, False),
    "8 bits, whole rows with minima": integers(8, 0, True),
    "E4M3, groups of 32": codes("e4m3", 32),
    "E4M3, groups of 128, rounded": codes("e4m3", 128, rounds=True),
    "E4M3, tiles, rounded": codes("e4m3", 128, rounds=True, tiled=True),
    "E5M2, whole rows": codes("e5m2", 0),
    "E2M1": codes("e2m1", 32),
    "NF4": table("nf4", 64),
    "FP4, groups of 128": table("fp4", 128),
    "NF4, whole rows": table("nf4", 0),
    "E4M3, whole rows, rounded": rounding(floats.DTYPE),
    "INT8, whole rows, rounded": rounding(torch.int8),
}

ODD: dict[str, Pack] = {
    "4 bits, groups of 16": integers(4, 16, False),
    "4 bits, groups of 16 with minima": integers(4, 16, True),
    "8 bits, groups of 16 with minima": integers(8, 16, True),
    "E4M3, groups of 16": codes("e4m3", 16),
    "E5M2, whole rows": codes("e5m2", 0),
    "E2M1, groups of 16": codes("e2m1", 16),
    "FP4, groups of 16": table("fp4", 16),
    "E4M3, whole rows, rounded": rounding(floats.DTYPE),
    "INT8, whole rows, rounded": rounding(torch.int8),
}
"""Forms of matrices whose inputs and outputs fill neither blocks of words nor tiles."""

ALWAYS = ("4 bits, groups of 128", "E4M3, groups of 128, rounded", "INT8, whole rows, rounded", "NF4")
"""The others are tested nightly, and on a GPU."""


class Case:
    """Random experts, with their values in float64, and tokens."""

    def __init__(self, pack: Pack, tokens: int, *, clamped: bool = False, odd: bool = False, **form: Any) -> None:
        torch.manual_seed(tokens)
        count, hidden, size = (5, 304, 192) if odd else (16, 1024, 384) if GPU else (4, 128, 128)
        gate = ClampedGate(1.702, 1.0) if clamped else None
        self.form = ExpertsForm(num_experts=count, hidden_size=hidden, size=size, clamped=gate, bias=clamped, **form)
        first, self.gate_up = self.matrices(pack, (2 if self.form.gated else 1) * size, hidden)
        second, self.down = self.matrices(pack, hidden, size)
        biases: tuple[Tensor | None, Tensor | None] = (None, None)
        if clamped:
            biases = tuple(torch.randn(count, n).to(DEVICE, DTYPE) for n in (len(self.gate_up[0]), hidden))  # type: ignore[assignment]
        self.stacked = StackedWeights(first, second, *biases)
        self.x, self.added = (torch.randn(tokens, hidden).to(DEVICE, DTYPE) for _ in range(2))
        self.limit = ROUNDED if first.rounds and tokens > packed_experts.MOST_UNROUNDED else TOLERANCE

    def matrices(self, pack: Pack, outputs: int, inputs: int) -> tuple[PackedMatrices, Tensor]:
        made = [pack(outputs, inputs) for _ in range(self.form.num_experts)]
        room: PackedMatrices | None = None
        for expert, (one, exact) in enumerate(made):
            assert one is not None
            if room is None:
                room = stacked(one, len(made), DTYPE)
            put(room, expert, one)
            # Numbers of a table, and perhaps scales, are rounded to float16.
            limit = 1e-6 if room.book is None else 5e-4
            assert (room.values(expert).cpu().double() - exact).norm() < limit * exact.norm()
        assert room is not None
        return room, torch.stack([exact for _, exact in made])

    def routed(self, top_k: int = 2, first: int | None = None) -> Routing:
        """Route at random; the first token to an expert, among others."""
        logits = torch.randn(len(self.x), self.form.num_experts, device=DEVICE)
        if first is not None:
            logits[0, first] = 9.0
        return route_on_device(logits, RoutingSpec(top_k=top_k, normalized=True))

    def expected(self, x: Tensor, routing: Routing) -> Tensor:
        def product(values: Tensor, bias: Tensor | None) -> Callable[[int, Tensor], Tensor]:
            own = None if bias is None else bias.cpu().double()
            return lambda expert, rows: rows @ values[expert].T + (0 if own is None else own[expert])

        gate_up, down = product(self.gate_up, self.stacked.gate_up_bias), product(self.down, self.stacked.down_bias)
        chosen = Routing(routing.weights.cpu(), routing.experts.cpu())
        return mix_reference(x.cpu().double(), chosen, gate_up, down, self.form)


def off(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    "form", [form if GPU or form in ALWAYS else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_sum_of_packed_experts(form: str, tokens: int) -> None:
    case = Case(FORMS[form], tokens)
    routing = case.routed()
    got = mix_stacked(case.x, routing, case.stacked, case.form, case.added)
    assert got.dtype == DTYPE
    assert off(got, case.expected(case.x, routing) + case.added.cpu().double()) < case.limit


FUSED = ("4 bits, groups of 128", "NF4", "E4M3, whole rows, rounded")


@pytest.mark.parametrize(
    "form", [form if GPU or form in FUSED else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_one_token_with_norm_and_residual_sum(form: str) -> None:
    case = Case(FORMS[form], 1)
    routing, hidden = case.routed(), case.form.hidden_size
    stream, norm = torch.randn(1, hidden).to(DEVICE), (torch.rand(hidden) + 0.5).to(DEVICE, DTYPE)
    inner = gate_rows(stream, (norm, 1e-5), routing, case.stacked, case.form)
    wide = stream.double().cpu()
    normed = wide / (wide.square().mean() + 1e-5).sqrt() * norm.double().cpu()
    expected = case.expected(normed, routing) + wide
    add_rows(inner, routing, case.stacked, case.form, stream)
    assert off(stream, expected) < case.limit


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize(
    "form", [form if GPU or form in ("E2M1", "NF4") else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_biases_and_clamped_gates(form: str, tokens: int) -> None:
    """As gpt-oss has them."""
    case = Case(FORMS[form], tokens, clamped=True)
    routing = case.routed()
    got = mix_stacked(case.x, routing, case.stacked, case.form)
    assert off(got, case.expected(case.x, routing)) < 3 * case.limit  # sums of large terms


OFTEN = ("4 bits, groups of 16 with minima", "FP4, groups of 16", "INT8, whole rows, rounded")


@pytest.mark.parametrize("tokens", [3, 13, 21])
@pytest.mark.parametrize(
    "form", [form if GPU or form in OFTEN else pytest.param(form, marks=pytest.mark.slow) for form in ODD]
)
def test_odd_sizes_and_experts_without_tokens(form: str, tokens: int) -> None:
    """Five experts, of which three get tokens: one of them all, another one a single token."""
    case = Case(ODD[form], tokens, odd=True)
    experts = torch.tensor([[4, 0]], dtype=torch.int32).repeat(tokens, 1)
    experts[1, 1] = 2
    routing = Routing(torch.rand(tokens, 2).to(DEVICE), experts.to(DEVICE))
    got = mix_stacked(case.x, routing, case.stacked, case.form, case.added)
    assert off(got, case.expected(case.x, routing) + case.added.cpu().double()) < case.limit


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("form", ["8 bits, groups of 64", "NF4"])
@pytest.mark.parametrize("changes", [{"on_inputs": True}, {"gated": False, "activation": "relu2"}], ids=str)
def test_weights_on_inputs_and_products_without_gates(changes: dict[str, Any], form: str, tokens: int) -> None:
    case = Case(FORMS[form], tokens, **changes)
    routing = case.routed()
    got = mix_stacked(case.x, routing, case.stacked, case.form)
    assert off(got, case.expected(case.x, routing)) < 2 * case.limit  # squares double errors


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter's numpy: rows that nothing has written
@pytest.mark.parametrize("form", ["8 bits, groups of 64", "NF4"])
def test_few_of_many_experts_are_read(form: str) -> None:
    """A rank has some of the experts."""
    case = Case(FORMS[form], 9)
    routing, own = case.routed(first=2), range(1, 4)  # of the first tokens' experts, too
    matrices = [
        replace(one, codes=one.codes[1:4], scales=one.scales[1:4])
        for one in (case.stacked.gate_up, case.stacked.down)
        if isinstance(one, PackedMatrices)
    ]
    part = StackedWeights(matrices[0], matrices[1], begin=1)
    absent = (routing.experts < own.start) | (routing.experts >= own.stop)
    expected = case.expected(case.x, Routing(routing.weights.masked_fill(absent, 0.0), routing.experts))
    tilings = tilings_for(case.x, 2, part, case.form)
    assert off(mix_tiles(case.x, routing, part, case.form, tilings).total(), expected) < case.limit
    few = case.expected(case.x[:2], Routing(routing.weights[:2].masked_fill(absent[:2], 0.0), routing.experts[:2]))
    some = Routing(routing.weights[:2], routing.experts[:2])
    assert off(mix_stacked(case.x[:2], some, part, case.form), few) < case.limit


@pytest.mark.parametrize("pack", [codes("e4m3", 96), codes("e4m3", 192), table("nf4", 96)])
def test_groups_of_codes_that_are_no_power_of_two(pack: Pack) -> None:
    torch.manual_seed(0)
    one, exact = pack(64, 384)
    assert one is not None
    matrices = stacked(one, 1, DTYPE)
    put(matrices, 0, one)
    for tokens in (3, 9):
        x = torch.randn(tokens, 384).to(DEVICE, DTYPE)
        assert off(linear(x, matrices, None, 0), x.cpu().double() @ exact.T) < TOLERANCE


SECOND = {
    "larger groups": (4, 128, False, "4-bit integers"),
    "smaller groups": (4, 64, False, "4-bit integers"),
    "minima": (4, 128, True, "4-bit integers with minima"),
    "more bits": (8, 128, False, None),
}


@pytest.mark.parametrize("second", SECOND)
def test_experts_of_different_forms(second: str) -> None:
    """The first one's groups are refined, or all are expanded; an adapter multiplies with one expert at a time."""
    torch.manual_seed(0)
    bits, group, minima, form_of_all = SECOND[second]
    first = 64 if second == "larger groups" else 128
    blocks = [
        [blocks_of(*form, *size) for size in ((64, 128), (128, 128))]
        for form in ((4, first, False), (bits, group, minima))
    ]
    form = ExpertsForm(num_experts=2, hidden_size=128, size=128, gated=False)
    scheme = PackedStack(form, DTYPE, DEVICE)
    for expert, (half, down) in enumerate(blocks):
        scheme.prepare(expert, [{"weight": half}, {"weight": half}], [{"weight": down}])
    assert [product.packed_as for product in scheme.both] == [form_of_all] * 2
    x = torch.randn(3, 128).to(DEVICE, DTYPE)
    for expert, (half, down) in enumerate(blocks):
        exact = value_of(half)
        assert off(scheme.gate_up_of(expert, x), x.cpu().double() @ torch.cat([exact, exact]).T) < TOLERANCE
        assert off(scheme.down_of(expert, x), x.cpu().double() @ value_of(down).T) < TOLERANCE


@pytest.mark.parametrize("usable", [False, True], ids=["Triton", "CUDA"])
def test_blocks_of_integers_do_not_depend_on_minima(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else experts of a layer would have different forms, and be expanded."""
    monkeypatch.setattr(packed_expert_tiles, "usable", lambda device: usable)
    made = [
        pack_expert([blocks_of(4, 128, minima, 64, 256)], torch.device("cpu"), rounds=False) for minima in (False, True)
    ]
    first, second = (one.words for one in made if one is not None)
    assert first == second


@pytest.mark.parametrize("second", ["tiny scales", "another table"])
def test_experts_in_tables(second: str) -> None:
    """Scales keep the precision of the expert that needs most; experts of different tables are expanded."""
    torch.manual_seed(0)
    blocks = [codes_of("table", 64, 64, 128) for _ in range(2)]
    if second == "tiny scales":
        blocks[1] = replace(blocks[1], book=blocks[0].book, scales=blocks[1].scales * 1e-6)
    product = ExpertMatrices(2, DTYPE, DEVICE, None, rounds=False)
    for expert, one in enumerate(blocks):
        product.take(expert, [{"weight": one}])
    assert product.packed_as == ("4-bit codes" if second == "tiny scales" else None)
    for expert, one in enumerate(blocks):
        if isinstance(product.matrices, PackedMatrices):
            assert off(product.matrices.values(expert), value_of(one)) < 5e-4
        else:
            assert off(product.value(expert), value_of(one)) < TOLERANCE


@pytest.mark.parametrize("plain", ["gate_up", "down"])
def test_one_product_is_packed_and_the_other_plain(plain: str) -> None:
    """As if a rank's share of the inputs cuts groups."""
    for tokens in (1, 9, 20):
        case = Case(FORMS["4 bits, groups of 128"], tokens)
        weight = (case.gate_up if plain == "gate_up" else case.down).to(DEVICE, DTYPE)
        mixed = replace(case.stacked, **{plain: weight})
        routing = case.routed()
        got = mix_stacked(case.x, routing, mixed, case.form, case.added)
        assert off(got, case.expected(case.x, routing) + case.added.cpu().double()) < case.limit


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
def test_both_products_have_tiles_of_one_height(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one is packed, since choices are sorted once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    monkeypatch.setattr(packed_expert_tiles, "usable", lambda device: capability == (9, 0))
    form = ExpertsForm(num_experts=16, hidden_size=1024, size=512)
    with FakeTensorMode():
        packed = StackedWeights(
            *(hopper.matrices(hopper.FORMS["4 bits"], 16, *shape) for shape in ((1024, 1024), (1024, 512)))
        )
        plain = StackedWeights(*(hopper.empty(16, *shape, dtype=DTYPE) for shape in ((1024, 1024), (1024, 512))))
        for tokens in (5, 100, 200, 300, 600):
            x = hopper.empty(tokens, 1024, dtype=DTYPE)
            for stacked_ in (packed, replace(packed, gate_up=plain.gate_up), replace(packed, down=plain.down)):
                first, second = tilings_for(x, 2, stacked_, form)
                assert first.height == second.height, tokens


def test_experts_whose_inputs_are_reordered_are_expanded() -> None:
    blocks = blocks_of(4, 64, False, 64, 128)
    order = torch.randperm(128)
    scheme = PackedStack(ExpertsForm(num_experts=1, hidden_size=128, size=128, gated=False), DTYPE, DEVICE)
    scheme.down.take(0, [{"weight": replace(blocks, order=order.int())}])
    assert scheme.down.packed_as is None
    x = torch.randn(3, 128).to(DEVICE, DTYPE)
    assert off(scheme.down_of(0, x), x.cpu().double() @ value_of(blocks)[:, order.argsort()].T) < TOLERANCE


def test_tiles_are_recognized() -> None:
    """Which allows a scale for all of a tile's outputs; also if another expert has none."""
    torch.manual_seed(0)
    tiles, groups = (codes("e4m3", 128, rounds=True, tiled=tiled)(256, 256)[0] for tiled in (True, False))
    assert tiles is not None
    assert groups is not None
    assert (tiles.tiled, groups.tiled) == (True, False)
    matrices = stacked(tiles, 2, DTYPE)
    assert matrices.tiled
    assert refined(matrices, tiles).tiled
    assert not refined(matrices, groups).tiled
