"""Experts in a native program, each instruction set's, against float64 and plain torch, with random inputs."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch
from levels import ISAS, needs_isa
from test_native_ops import FORMATS, random_blocks
from torch import Tensor

from octavo.native.bindings import Dtype, OpKind, StepArgs
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool, Program
from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops.experts import mix_reference
from octavo.nn.ops.routing import Routing, route
from octavo.nn.quant.blocks import BlockQuantized, dequantized
from octavo.nn.quant.packed_experts import Beside, PackedExperts, routing_args
from octavo.nn.weights import Stored

EXPERTS, HIDDEN, TOP = 12, 64, 3
BESIDE = Beside()


@pytest.fixture(scope="module", params=ISAS)
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(2, needs_isa(request.param))


@pytest.fixture
def generator() -> torch.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def step_of(tokens: int, *external: Tensor) -> StepArgs:
    step = StepArgs(tokens=tokens)
    step.external[: len(external)] = tuple(one.data_ptr() for one in external)
    return step


# --- routing


ROUTINGS = {
    "softmax": RoutingSpec(top_k=TOP),
    "normalized": RoutingSpec(top_k=TOP, normalized=True, scaling=1.5),
    "sigmoid": RoutingSpec(top_k=TOP, scores="sigmoid", scaling=2.5),
    "corrected": RoutingSpec(top_k=TOP, scores="sigmoid", corrected=True, normalized=True),
    "floor": RoutingSpec(top_k=1, scores="sigmoid", normalized=True, floor=0.9),
    "groups": RoutingSpec(top_k=TOP, groups=4, top_groups=2),
    "groups by two": RoutingSpec(
        top_k=TOP, scores="sigmoid", corrected=True, groups=3, top_groups=2, group_score="top2", normalized=True
    ),
    "chosen": RoutingSpec(top_k=TOP, scores="chosen"),
    "mixer": RoutingSpec(top_k=2, scores="mixer", jitter=0.1),
    "all": RoutingSpec(top_k=EXPERTS),
}


def routed(pool: Pool, logits: Tensor, spec: RoutingSpec, correction: Tensor | None = None) -> Routing:
    tokens, count = logits.shape
    weights, experts = torch.zeros(tokens, spec.top_k), torch.zeros(tokens, spec.top_k, dtype=torch.int32)
    b = ProgramBuilder.make(-(-count // 16) * 64, 0)
    padded = torch.full((tokens, -(-count // 16) * 16), 1e30)  # nothing reads the rest of the router's last panel
    padded[:, :count] = logits
    args = routing_args(spec, count, correction, BESIDE)
    args.chosen, args.weights = 1, 2
    b.add(OpKind.ROUTE, Dtype.FLOAT, 0, 0, columns=count, details=ctypes.addressof(args))
    Program(pool, b).run(0, 1, step_of(tokens, padded, experts, weights))
    return Routing(weights, experts)


@pytest.mark.parametrize("spec", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("count", [EXPERTS, 48])
def test_routing_is_that_of_torch(pool: Pool, generator: torch.Generator, spec: RoutingSpec, count: int) -> None:
    logits = torch.randn(33, count, generator=generator) * 3
    correction = torch.randn(count, generator=generator) if spec.corrected else None
    got, expected = routed(pool, logits, spec, correction), route(logits, spec, correction)
    assert torch.equal(got.experts, expected.experts)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-5, atol=1e-6)


def test_equal_scores_choose_the_first_experts(pool: Pool) -> None:
    for spec in (ROUTINGS["softmax"], ROUTINGS["groups by two"], ROUTINGS["mixer"]):
        got = routed(pool, torch.zeros(2, EXPERTS), spec, torch.zeros(EXPERTS))
        assert got.experts.tolist() == [list(range(spec.top_k))] * 2


@pytest.mark.parametrize("spec", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("flaw", [torch.nan, torch.inf, -torch.inf])
def test_flawed_logits_choose_experts_that_exist(pool: Pool, spec: RoutingSpec, flaw: float) -> None:
    """And NaN stays visible in the weights; the row beside it is not changed."""
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(1))
    sound = routed(pool, logits, spec, torch.zeros(EXPERTS))
    logits[1] = flaw
    got = routed(pool, logits, spec, torch.zeros(EXPERTS))
    assert all(len(set(row)) == spec.top_k and set(row) <= set(range(EXPERTS)) for row in got.experts.tolist())
    if flaw != flaw:
        assert torch.isnan(got.weights[1]).all()
    assert torch.equal(got.weights[::2], sound.weights[::2])


# --- products


FORMS: dict[str, dict[str, Any]] = {
    "silu": {},
    "gelu, bias": {"activation": "gelu_tanh", "bias": True},
    "clamped, bias": {"clamped": ClampedGate(1.7, 1.0), "bias": True},
    "inputs": {"on_inputs": True},
    "plain": {"activation": "relu2", "gated": False},
}
STORED = {"float": 2e-5, "bfloat16": 2e-2, **dict.fromkeys(FORMATS, 2e-3)}
"""Storage of the weights -> largest error, of outputs of order 1."""


class Layer:
    """A layer's experts with random weights: packed, and as float64 of what is stored."""

    def __init__(self, generator: torch.Generator, form: ExpertsForm, stored: str | list[str]) -> None:
        self.form = form
        kinds = [stored] * form.num_experts if isinstance(stored, str) else stored
        outer = (2 if form.gated else 1, form.size, form.hidden_size)
        self.up = [self._make(generator, kind, *outer) for kind in kinds]
        self.down = [self._make(generator, kind, 1, form.hidden_size, form.size) for kind in kinds]
        schemes = [[scheme for scheme, _, _ in each] for each in (self.up, self.down)]
        self.packed = PackedExperts(form, *schemes)

    def _make(
        self, generator: torch.Generator, kind: str, count: int, rows: int, columns: int
    ) -> tuple[BlockQuantized, Tensor, Tensor | None]:
        dtype = torch.float32 if kind == "float" else torch.bfloat16
        scheme, parts, values = BlockQuantized(dtype, torch.device("cpu")), [], []
        for _ in range(count):
            weight: Stored
            if kind in FORMATS:
                weight = random_blocks(generator, rows, columns, kind)
                weight.scales.mul_(1.7 * columns**-0.5)
                if weight.minima is not None:
                    weight.minima.mul_(columns**-0.5)
                values.append(dequantized(weight, torch.float32))
            else:
                weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(dtype)
                values.append(weight.float())
            bias = torch.randn(rows, generator=generator).to(dtype)
            parts.append({"weight": weight} | ({"bias": bias} if self.form.bias else {}))
        scheme.prepare(parts)
        biases = torch.cat([part["bias"] for part in parts if "bias" in part]) if self.form.bias else None
        return scheme, torch.cat(values).double(), biases

    def expected(self, x: Tensor, routing: Routing) -> Tensor:
        def of(products: list[Any]) -> Any:
            def multiply(expert: int, x: Tensor) -> Tensor:
                _, weight, bias = products[expert]
                return x.double() @ weight.T + (0.0 if bias is None else bias.double())

            return multiply

        return mix_reference(x.double(), routing, of(self.up), of(self.down), self.form)

    def run(self, pool: Pool, x: Tensor, logits: Tensor, spec: RoutingSpec, planes: int = 2, **changes: Any) -> Tensor:
        """Return the sums; `changes` are `add` and `output`, what they are added to."""
        add, output = changes.get("add"), changes.get("output", torch.empty(x.shape))
        b = ProgramBuilder.make(x.shape[1] * 4, x.shape[1] * 4, planes, logits.shape[1] * 4)
        self.packed.emit(b, routing_args(spec, self.form.num_experts, None, BESIDE), 2, 0, 1, add=add)
        Program(pool, b).run(0, len(b.ops), step_of(len(x), x, output, logits))
        return output


def logits_of(generator: torch.Generator, tokens: int, count: int = EXPERTS) -> Tensor:
    return torch.randn(tokens, count, generator=generator)


def padded(logits: Tensor) -> Tensor:
    return torch.nn.functional.pad(logits, (0, -logits.shape[1] % 16))


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("tokens", "size"), [(1, 96), (2, 40), (43, 96)])
def test_sums_of_experts(
    pool: Pool, generator: torch.Generator, changes: dict[str, Any], stored: str, tokens: int, size: int
) -> None:
    size = size if size % 32 == 0 or stored not in FORMATS else 32
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=size, **changes)
    spec = RoutingSpec(top_k=TOP, scores="sigmoid", normalized=True, on_inputs=form.on_inputs)
    layer, x = Layer(generator, form, stored), torch.randn(tokens, HIDDEN, generator=generator)
    logits = logits_of(generator, tokens)
    got = layer.run(pool, x, padded(logits), spec)
    x = x.bfloat16().float() if stored == "bfloat16" and not form.on_inputs else x
    limit = STORED[stored]
    torch.testing.assert_close(got.double(), layer.expected(x, route(logits, spec)), rtol=limit, atol=2 * limit)


@pytest.mark.parametrize(("planes", "limit"), [(0, 3e-2), (1, 6e-2)])
def test_other_activations_of_integer_weights(
    pool: Pool, generator: torch.Generator, planes: int, limit: float
) -> None:
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=96)
    layer, x = Layer(generator, form, "4 bits, minima"), torch.randn(17, HIDDEN, generator=generator)
    logits, spec = logits_of(generator, 17), RoutingSpec(top_k=TOP, normalized=True)
    got = layer.run(pool, x, padded(logits), spec, planes)
    torch.testing.assert_close(got.double(), layer.expected(x, route(logits, spec)), rtol=limit, atol=limit)


def test_experts_may_be_stored_in_different_formats(pool: Pool, generator: torch.Generator) -> None:
    kinds = ["bfloat16", "4 bits", "8 bits, minima", "4 bits, minima"] * 3
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=64)
    layer, x = Layer(generator, form, kinds), torch.randn(17, HIDDEN, generator=generator)
    assert len(layer.packed.dtypes) == 3
    logits, spec = logits_of(generator, 17), RoutingSpec(top_k=TOP)
    got = layer.run(pool, x, padded(logits), spec)
    torch.testing.assert_close(got.double(), layer.expected(x, route(logits, spec)), rtol=2e-2, atol=2e-2)


def test_inputs_in_another_order(pool: Pool, generator: torch.Generator) -> None:
    """As GPTQ stores them; each expert has an order of its own."""
    form = ExpertsForm(num_experts=4, hidden_size=HIDDEN, size=32)
    layer = Layer(generator, form, "8 bits")
    for matrix, made in ((layer.packed.expand, layer.up), (layer.packed.reduce, layer.down)):
        for expert in range(4):
            columns = matrix[expert].columns
            order = torch.randperm(columns, generator=generator)
            matrix[expert].order = order.int()
            scheme, weight, bias = made[expert]
            made[expert] = (scheme, torch.empty_like(weight).index_copy_(1, order, weight), bias)
    x, logits, spec = torch.randn(9, HIDDEN, generator=generator), logits_of(generator, 9, 4), RoutingSpec(top_k=2)
    got = layer.run(pool, x, padded(logits), spec)
    torch.testing.assert_close(got.double(), layer.expected(x, route(logits, spec)), rtol=2e-3, atol=2e-3)


def test_sums_are_added_with_a_factor(pool: Pool, generator: torch.Generator) -> None:
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=48)
    layer, x = Layer(generator, form, "float"), torch.randn(5, HIDDEN, generator=generator)
    before, logits, spec = torch.randn(5, HIDDEN, generator=generator), logits_of(generator, 5), RoutingSpec(top_k=TOP)
    got = layer.run(pool, x, padded(logits), spec, add=0.3, output=before.clone())
    expected = before.double() + 0.3 * layer.expected(x, route(logits, spec))
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("stored", ["float", "bfloat16", "4 bits, minima", "8 bits"])
@pytest.mark.parametrize("planes", [0, 1, 2])
def test_a_token_gives_the_same_bits_in_any_batch_and_on_any_threads(
    pool: Pool, generator: torch.Generator, stored: str, planes: int
) -> None:
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=HIDDEN, size=96)
    layer, x = Layer(generator, form, stored), torch.randn(90, HIDDEN, generator=generator)
    logits, spec = padded(logits_of(generator, 90)), RoutingSpec(top_k=TOP)
    whole = layer.run(pool, x, logits, spec, planes)
    for first, count in ((0, 1), (1, 2), (4, 3), (9, 7), (17, 41), (88, 2)):
        cut = slice(first, first + count)
        assert torch.equal(layer.run(pool, x[cut].contiguous(), logits[cut].contiguous(), spec, planes), whole[cut])
    for threads in (1, 3):
        assert torch.equal(layer.run(Pool(threads, pool.isa), x, logits, spec, planes), whole)


def test_one_expert_of_all_rows(pool: Pool, generator: torch.Generator) -> None:
    """More rows than a task takes."""
    form = ExpertsForm(num_experts=EXPERTS, hidden_size=1536, size=32)
    layer, x = Layer(generator, form, "float"), torch.randn(300, 1536, generator=generator)
    logits = torch.zeros(300, EXPERTS)
    logits[:, 5] = 9.0
    spec = RoutingSpec(top_k=1)
    got = layer.run(pool, x, padded(logits), spec)
    torch.testing.assert_close(got.double(), layer.expected(x, route(logits, spec)), rtol=2e-5, atol=4e-5)
