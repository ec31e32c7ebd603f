"""Triton's kernels of recurrent layers against those of CPUs, on the GPU or under the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from octavo.nn.recurrent import conv, delta_rule, selective, ssd
from octavo.nn.recurrent.gated_norm import GatedNorm
from octavo.nn.recurrent.triton_conv import causal_conv
from octavo.nn.recurrent.triton_delta import gated_delta_rule
from octavo.nn.recurrent.triton_gated_norm import gated_norm
from octavo.nn.recurrent.triton_scan import selective_scan
from octavo.nn.recurrent.triton_ssd import ssd as triton_ssd
from octavo.nn.step import StepInput

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, GROUPS, CHANNELS, STATE = 4, 2, 24, 12
INNER = HEADS * CHANNELS
STEPS = {"single": ((1, 1, 1), (0, 3, 9)), "mixed": ((1, 70, 2, 5), (3, 40, 1, 0))}
"""Lengths of rows, and of what came before them; a row of padding is added."""


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> StepInput:
    """Rows whose block tables are found by slots, the last one padding that would overwrite block 4."""
    lengths, past = STEPS[request.param]
    starts = torch.tensor([0, *lengths, 1]).cumsum(0)
    lens = [n + before for n, before in zip(lengths, past, strict=True)]
    tokens = torch.zeros(int(starts[-1]), dtype=torch.int64)
    return StepInput(
        input_ids=tokens,
        positions=tokens,
        query_start=starts.int(),
        seq_lens=torch.tensor([*lens, 0], dtype=torch.int32),
        block_tables=torch.tensor([[4, 0], [3, 0], [1, 0], [0, 0], [4, 0], [2, 0]], dtype=torch.int32),
        table_rows=torch.tensor([*range(1, 1 + len(lengths)), 0], dtype=torch.int32)[: len(starts) - 1],
        slot_mapping=tokens,
        logit_rows=starts[1:] - 1,
        max_query_len=max(lengths),
        max_seq_len=max(lens),
    )


def held(step: StepInput) -> StepInput:
    """The same in host memory, without the row of padding."""
    rows = step.table_rows
    assert rows is not None
    tables = step.block_tables[rows[:-1]]
    return replace(
        step, query_start=step.query_start[:-1], seq_lens=step.seq_lens[:-1], block_tables=tables, table_rows=None
    )


def there(step: StepInput) -> StepInput:
    fields = ("query_start", "seq_lens", "block_tables", "table_rows")
    return replace(step, **{name: getattr(step, name).to(DEVICE) for name in fields})


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(step: StepInput, out: Tensor, states: Tensor, got: Tensor, got_states: Tensor) -> None:
    tokens = len(out)
    torch.testing.assert_close(got[:tokens].cpu(), out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_states.cpu(), states, rtol=1e-3, atol=1e-3)
    assert got.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_convolution(step: StepInput, bias: bool) -> None:
    x = random(step.num_tokens, 2 * INNER)[:, :INNER]
    weight, states = random(INNER, 4, seed=4), random(5, INNER, 3, seed=5)
    add = weight[:, 1].contiguous() if bias else None
    count = step.num_tokens - 1
    got_states = states.to(DEVICE, copy=True)
    bias_there = None if add is None else add.to(DEVICE)
    got = causal_conv(x.to(DEVICE), weight.to(DEVICE), bias_there, got_states, there(step), activates=bias)
    out = conv.causal_conv(x[:count], weight, add, states, held(step), activates=bias)
    compare(step, out, states, got, got_states)
    assert (got[count:] == 0).all()


def test_ssd(step: StepInput) -> None:
    x, states = random(step.num_tokens, 3 * INNER), random(5, HEADS, CHANNELS, STATE, seed=5)
    x[-1] = 0
    values = x[:, :INNER].unflatten(1, (HEADS, CHANNELS))
    into, read = x[:, INNER : INNER + 2 * GROUPS * STATE].unflatten(1, (2, GROUPS, STATE)).unbind(1)
    raw, count = x[:, -HEADS:], step.num_tokens - 1
    learned = (-torch.linspace(0.1, 2, HEADS), torch.ones(HEADS), random(HEADS))
    rates = ssd.Rates(*learned, 0.01, float("inf"))
    got_states = states.to(DEVICE, copy=True)
    rates_there = ssd.Rates(*(one.to(DEVICE) for one in learned), 0.01, float("inf"))
    parts = [one.to(DEVICE) for one in (values, raw, into, read)]
    got = triton_ssd(*parts, rates_there, got_states, there(step))
    out = ssd.ssd(values[:count], raw[:count], into[:count], read[:count], rates, states, held(step))
    compare(step, out, states, got, got_states)


def test_selective_scan(step: StepInput) -> None:
    count, states = step.num_tokens - 1, random(5, INNER, STATE, seed=5)
    x, dt = random(step.num_tokens, INNER), F.softplus(random(step.num_tokens, INNER, seed=6))
    b, c = random(step.num_tokens, 2 * STATE, seed=7).split(STATE, 1)
    decay, skip = -random(INNER, STATE, seed=8).exp(), random(INNER)
    got_states = states.to(DEVICE, copy=True)
    got = selective_scan(*(one.to(DEVICE) for one in (x, dt, b, c, decay, skip)), got_states, there(step))
    out = selective.selective_scan(x[:count], dt[:count], b[:count], c[:count], decay, skip, states, held(step))
    compare(step, out, states, got, got_states)


def test_delta_rule(step: StepInput) -> None:
    count, states = step.num_tokens - 1, random(5, HEADS, STATE, CHANNELS, seed=5)
    q, k = random(step.num_tokens, 2, GROUPS, STATE).unbind(1)
    v = random(step.num_tokens, HEADS, CHANNELS, seed=6)
    raw, rate = random(step.num_tokens, 2 * HEADS, seed=7).split(HEADS, 1)
    learned = (-torch.linspace(0.1, 2, HEADS), random(HEADS))
    got_states = states.to(DEVICE, copy=True)
    gates = delta_rule.Gates(*(one.to(DEVICE) for one in learned))
    got = gated_delta_rule(*(one.to(DEVICE) for one in (q, k, v, raw, rate)), gates, got_states, there(step))
    parts = [one[:count] for one in (q, k, v, raw, rate)]
    out = delta_rule.gated_delta_rule(*parts, delta_rule.Gates(*learned), states, held(step))
    compare(step, out, states, got, got_states)


@pytest.mark.parametrize(("size", "gate_first"), [(INNER, True), (INNER // 2, False)])
def test_gated_norm(size: int, gate_first: bool) -> None:
    x, gate = random(3, INNER), random(3, 2 * INNER, seed=4)[:, INNER:]
    norm = GatedNorm("", torch.device("cpu"), torch.float32, size, 1e-5, groups=2, gate_first=gate_first)
    norm.weight = random(size, seed=5)
    got = gated_norm(
        x.to(DEVICE), gate.to(DEVICE), norm.weight.to(DEVICE), 1e-5, torch.float32, 2, gate_first=gate_first
    )
    torch.testing.assert_close(got.cpu(), norm.gated(x, gate), rtol=1e-4, atol=1e-4)
