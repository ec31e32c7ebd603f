"""Recurrent layers' operations in a native program, each instruction set's, against float64, with random inputs; and
against themselves, bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from levels import ISAS, needs_isa
from recurrent_kit import Rows, in_program
from torch import Tensor
from torch.nn import functional as F

from octavo.native.bindings import Dtype
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool
from octavo.native.recurrent import Scan, apply_delta_rule, gate_by_sigmoid, scan_channels, scan_heads
from octavo.nn.quant.packed import DTYPES
from octavo.nn.recurrent.conv import CausalConv
from octavo.nn.recurrent.delta_rule import Gates
from octavo.nn.recurrent.gated_norm import GatedNorm
from octavo.nn.recurrent.ssd import Rates
from octavo.nn.shard import Run

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module", params=ISAS)
def pool(request: pytest.FixtureRequest) -> Pool:
    return Pool(2, needs_isa(request.param))


@pytest.fixture
def generator() -> torch.Generator:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def rng_of(generator: torch.Generator) -> random.Random:
    return random.Random(generator.initial_seed())


@dataclass
class Operation:
    """An operation: what it reads, how it is emitted, and what it computes of a row.

    Attributes:
        width: values of a row of the input.
        outputs: values of a row of the results.
        state: shape of a state.
        emit: adds the operation from buffer 0 to buffer 1, on the states of all blocks.
        expected: (inputs of a row, its state before) -> (results, the state after), all float64.
        in_place: the results take places of the inputs.
        begin: of the results in their rows.
    """

    width: int
    outputs: int
    state: tuple[int, ...]
    emit: Callable[[ProgramBuilder, Tensor, Dtype], None]
    expected: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    in_place: bool = False
    begin: int = 0

    def run(self, pool: Pool, rows: Rows, x: Tensor, states: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the results [T, outputs], in rows of whole panels as a program's; replace the states."""
        x, result = x.clone(), torch.full((rows.tokens, -(-self.outputs // 16) * 16), torch.nan, dtype=dtype)
        b = ProgramBuilder.make(x.stride(0) * 4, result.stride(0) * result.element_size())
        self.emit(b, states, DTYPES[dtype])
        rows.run(pool, b, x, result)
        return (x if self.in_place else result)[:, self.begin : self.begin + self.outputs]

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.width, generator=generator)


def conv_with(channels: int, taps: int, generator: torch.Generator, *, bias: bool, activates: bool) -> CausalConv:
    conv = CausalConv("conv", CPU, [Run(channels)], taps, bias=bias, activates=activates)
    weight = torch.randn(channels, 1, taps, generator=generator)
    conv.place([weight, torch.randn(channels, generator=generator)] if bias else [weight])
    return conv


def short_conv(generator: torch.Generator) -> Operation:
    """LFM2's: gates before and after, no activation. Channels of several tasks, and not of whole vectors."""
    channels, taps = rng_of(generator).choice([(20, 3), (150, 4), (33, 2), (130, 7)])
    conv = conv_with(channels, taps, generator, bias=False, activates=False)

    def emit(b: ProgramBuilder, states: Tensor, dtype: Dtype) -> None:
        conv.emit(b, 0, 1, in_program(states), 0, begin=2 * channels, gates=(0, channels), dtype=dtype)

    def expected(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        before, after, own = x.chunk(3, 1)
        y, state = convolved(before * own, conv, state)
        return y * after, state

    return Operation(3 * channels, channels, conv.state_shape, emit, expected)


def activated_conv(generator: torch.Generator) -> Operation:
    """Those of state spaces and the delta rule: a bias, SiLU, and other values in the rows."""
    (own, taps), begin = rng_of(generator).choice([(40, 4), (131, 4), (16, 3)]), 5
    conv = conv_with(own, taps, generator, bias=True, activates=True)

    def emit(b: ProgramBuilder, states: Tensor, dtype: Dtype) -> None:
        conv.emit(b, 0, 1, in_program(states), 0, begin=begin, dtype=dtype)

    def expected(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = convolved(x[:, begin : begin + own], conv, state)
        return F.silu(y), state

    return Operation(begin + own + 3, own, conv.state_shape, emit, expected)


def convolved(x: Tensor, conv: CausalConv, state: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a row's tokens one by one."""
    weight, results = conv.weight.double(), []
    for token in x:
        window = torch.cat([state, token[:, None]], 1)
        results.append((window * weight).sum(1) + (0.0 if conv.bias is None else conv.bias.double()))
        state = window[:, 1:]
    return torch.stack(results), state


def state_space(generator: torch.Generator) -> Operation:
    """Mamba-2's. Heads of a number of channels that is not one of those advanced together, and states of any size."""
    heads, groups, channels, size = rng_of(generator).choice(
        [(6, 2, 5, 8), (4, 1, 64, 128), (3, 3, 7, 40), (8, 2, 9, 19)]
    )
    decay, skip, bias = -torch.rand(heads, generator=generator), *torch.randn(2, heads, generator=generator)
    rates = Rates(decay, skip, bias, 0.01, 1.5)
    parts = [heads * channels, groups * size, groups * size, heads]

    def emit(b: ProgramBuilder, states: Tensor, dtype: Dtype) -> None:
        space = rates.in_program(b)
        space.states, space.sizes, space.raw = in_program(states), 0, sum(parts[:3])
        space.heads, space.head_dim, space.state, space.groups = heads, channels, size, groups
        scan_heads(b, space, 0, 0)

    def expected(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        own, into, read, raw = x.split(parts, 1)
        own = own.unflatten(1, (heads, channels))
        into, read = (part.unflatten(1, (groups, size)).repeat_interleave(heads // groups, 1) for part in (into, read))
        steps, results = F.softplus(raw + bias.double()).clamp(0.01, 1.5), []
        for t, dt in enumerate(steps):
            state = state * (dt * decay.double()).exp()[:, None, None]
            state = state + (own[t] * dt[:, None])[..., None] * into[t][:, None]
            results.append((state * read[t][:, None]).sum(-1) + own[t] * skip.double()[:, None])
        return torch.stack(results).flatten(1), state

    return Operation(sum(parts), parts[0], (heads, channels, size), emit, expected, in_place=True)


def delta_rule(generator: torch.Generator) -> Operation:
    """Heads of one and of several tasks, and of values that end within a vector."""
    keys, key_dim, heads, size = rng_of(generator).choice(
        [(2, 16, 4, 24), (1, 128, 2, 128), (2, 20, 2, 70), (3, 8, 3, 8)]
    )
    decay, bias = -torch.rand(heads, generator=generator), torch.randn(heads, generator=generator)
    gates = Gates(decay, bias)
    parts = [keys * key_dim, keys * key_dim, heads * size, heads, heads]

    def emit(b: ProgramBuilder, states: Tensor, dtype: Dtype) -> None:
        rule = gates.in_program(b)
        rule.states, rule.gates, rule.rate, rule.raw = in_program(states), 0, sum(parts[:3]), sum(parts[:4])
        rule.key_heads, rule.key_dim, rule.heads, rule.head_dim = keys, key_dim, heads, size
        apply_delta_rule(b, rule, 0, 0)

    def expected(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, rate, raw = x.split(parts, 1)
        q, k = (part.unflatten(1, (keys, key_dim)).repeat_interleave(heads // keys, 1) for part in (q, k))
        q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
        v, results = v.unflatten(1, (heads, size)), []
        decays = (decay.double() * F.softplus(raw + bias.double())).exp()
        for t, own in enumerate(decays):
            state = state * own[:, None, None]
            found = (k[t][..., None] * state).sum(1)
            state = state + k[t][..., None] * ((v[t] - found) * rate[t].sigmoid()[:, None])[:, None]
            results.append((q[t][..., None] * state).sum(1) * key_dim**-0.5)
        return torch.stack(results).flatten(1), state

    return Operation(sum(parts), parts[2], (heads, key_dim, size), emit, expected, in_place=True, begin=sum(parts[:2]))


def selective_scan(generator: torch.Generator) -> Operation:
    """Mamba's. Channels of several tasks, and states of less, more and exactly a vector."""
    channels, size = rng_of(generator).choice([(20, 8), (130, 16), (70, 19), (64, 4)])
    decay, skip = -torch.rand(channels, size, generator=generator) * 2, torch.randn(channels, generator=generator)
    parts = [channels, channels, channels, size, size]

    def emit(b: ProgramBuilder, states: Tensor, dtype: Dtype) -> None:
        b.kept.extend((decay, skip))
        space = Scan(decay=decay.data_ptr(), skip=skip.data_ptr(), states=in_program(states))
        space.channels, space.state, space.gate = channels, size, channels
        places = {"sizes": 0, "parts": 0, "gates": 0, "into": 3 * channels, "read": 3 * channels + size}
        for name, place in places.items():
            setattr(space, name, place)
        scan_channels(b, space, 0, 1, dtype, 0)

    def expected(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        own, gate, _, into, read = x.split(parts, 1)
        results = []
        for t, dt in enumerate(F.softplus(own)):  # the inputs are step sizes, too, since these have a buffer
            state = (dt[:, None] * decay.double()).exp() * state + (dt * own[t])[:, None] * into[t]
            results.append(((state * read[t]).sum(-1) + skip.double() * own[t]) * F.silu(gate[t]))
        return torch.stack(results), state

    return Operation(sum(parts), channels, (channels, size), emit, expected)


OPERATIONS = {
    "short conv": short_conv,
    "activated conv": activated_conv,
    "state space": state_space,
    "delta rule": delta_rule,
    "selective scan": selective_scan,
}


@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def operation(request: pytest.FixtureRequest, generator: torch.Generator) -> Operation:
    made: Operation = request.param(generator)
    return made


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_results_and_states(pool: Pool, generator: torch.Generator, operation: Operation, dtype: torch.dtype) -> None:
    """No other block changes; rows without tokens keep their states."""
    rows = Rows.drawn(rng_of(generator))
    x, states = operation.inputs(rows.tokens, generator), rows.states(generator, *operation.state)
    found = states.clone()
    got = operation.run(pool, rows, x, found, dtype)
    after = states.double()
    for row, (first, end) in enumerate(rows.spans()):
        if first == end:
            continue
        expected, state = operation.expected(x[first:end].double(), rows.before(row, states))
        limit = TOLERANCE[dtype]
        torch.testing.assert_close(got[first:end].double(), expected, rtol=limit, atol=2 * limit)
        after[rows.blocks[row]] = state
    torch.testing.assert_close(found.double(), after, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_a_row_gives_the_same_bits_alone_in_chunks_and_on_any_threads(
    pool: Pool, generator: torch.Generator, operation: Operation
) -> None:
    rng = rng_of(generator)
    rows = Rows.drawn(rng)
    x, states = operation.inputs(rows.tokens, generator), rows.states(generator, *operation.state)
    together = states.clone()
    whole = operation.run(pool, rows, x, together)
    alone, others = states.clone(), Pool(rng.choice([1, 3]), pool.isa)
    for row, (first, end) in enumerate(rows.spans()):
        begin = first
        while begin < end:
            stop = rng.randint(begin + 1, end)
            part = rows.only(row, begin - first, stop - first)
            assert torch.equal(operation.run(others, part, x[begin:stop].contiguous(), alone), whole[begin:stop])
            begin = stop
    assert torch.equal(alone.nan_to_num(), together.nan_to_num())


def test_a_step_without_tokens(pool: Pool, generator: torch.Generator, operation: Operation) -> None:
    states = torch.randn(3, *operation.state, generator=generator)
    before = states.clone()
    operation.run(pool, Rows([], [], [], 3), torch.zeros(0, operation.width), states)
    operation.run(pool, Rows([0, 0], [4, 0], [1, 2], 3), torch.zeros(0, operation.width), states)
    assert torch.equal(states, before)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("groups", "size", "shared"), [(1, 64, False), (3, 24, True), (2, 19, False), (5, 7, True)])
def test_gated_norm(
    pool: Pool,
    generator: torch.Generator,
    gate_first: bool,
    dtype: torch.dtype,
    groups: int,
    size: int,
    shared: bool,
) -> None:
    """Of groups that end within a vector, each with weights of its own or all with the same."""
    channels, tokens = groups * size, 5
    weight = torch.randn(size if shared else channels, generator=generator)
    form = {"groups": groups, "gate_first": gate_first}
    norm = GatedNorm("norm", CPU, torch.float32, len(weight), 1e-5, **form)
    norm.place([weight])
    norm.pack()
    x = torch.randn(tokens, 2 * channels + 3, generator=generator)
    result = torch.full((tokens, -(-channels // 16) * 16), torch.nan, dtype=dtype)
    b = ProgramBuilder.make(x.stride(0) * 4, result.stride(0) * result.element_size())
    norm.emit_gated(b, (0, 3), (0, 3 + channels), 1, DTYPES[dtype], channels)
    Rows([tokens], [0], [0], 1).run(pool, b, x, result)
    own, gate = x[:, 3:].double().chunk(2, 1)
    gate = F.silu(gate)
    parts = (own * gate if gate_first else own).unflatten(1, (groups, size))
    normed = (F.rms_norm(parts, (size,), eps=1e-5) * weight.double().view(-1, size)).flatten(1)
    limit = TOLERANCE[dtype]
    expected = normed if gate_first else normed * gate
    torch.testing.assert_close(result[:, :channels].double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("columns", "channels"), [(48, 1), (3, 16)], ids=["channels", "heads"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gate_of_attention(
    pool: Pool, generator: torch.Generator, dtype: torch.dtype, columns: int, channels: int
) -> None:
    gates, rows = torch.randn(7, columns, generator=generator) * 4, torch.randn(7, 48, generator=generator).to(dtype)
    expected = rows.double() * gates.double().sigmoid().repeat_interleave(channels, 1)
    b = ProgramBuilder.make(columns * 4, 48 * rows.element_size())
    gate_by_sigmoid(b, 0, 1, DTYPES[dtype], columns, channels)
    Rows([7], [0], [0], 1).run(pool, b, gates, rows)
    torch.testing.assert_close(rows.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_softplus_far_from_zero(pool: Pool, generator: torch.Generator) -> None:
    """By the step sizes of a state space that only adds them up: inputs 1, no decay."""
    raw = torch.cat([torch.linspace(-80, 80, 301), torch.randn(20, generator=generator) * 3])
    rates = Rates(torch.zeros(1), torch.zeros(1), torch.zeros(1), 0.0, torch.inf)
    x, states = torch.cat([torch.ones(len(raw), 3), raw[:, None]], 1), torch.zeros(len(raw), 1, 1, 1)
    b = ProgramBuilder.make(x.stride(0) * 4, 0)
    space = rates.in_program(b)
    space.states, space.sizes, space.raw = in_program(states), 0, 3
    space.heads = space.head_dim = space.state = space.groups = 1
    scan_heads(b, space, 0, 0)
    rows = Rows([1] * len(raw), [0] * len(raw), list(range(len(raw))), len(raw))
    rows.run(pool, b, x)
    torch.testing.assert_close(x[:, 0].double(), F.softplus(raw.double(), threshold=1e9), rtol=1e-6, atol=0)
