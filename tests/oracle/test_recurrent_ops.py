"""Operations of recurrent layers: chunks against single tokens, and each row by itself against rows together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from octavo.nn.recurrent.conv import causal_conv
from octavo.nn.recurrent.delta_rule import Gates, gated_delta_rule
from octavo.nn.recurrent.selective import selective_scan
from octavo.nn.recurrent.ssd import Rates, ssd
from octavo.nn.step import StepInput

LENGTHS = (1, 70, 1, 5, 1)
PAST = (3, 40, 0, 0, 9)
HEADS, GROUPS, CHANNELS, STATE = 32, 2, 4, 16
"""32 heads: torch rounds softplus otherwise in the last part of a tensor that does not fill two AVX-512 registers."""
Operation = Callable[[Tensor, Tensor, StepInput], Tensor]


def step_of(lengths: Sequence[int], past: Sequence[int], blocks: Sequence[int]) -> StepInput:
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return StepInput(
        input_ids=torch.zeros(int(starts[-1]), dtype=torch.int64),
        positions=torch.zeros(int(starts[-1]), dtype=torch.int64),
        query_start=starts.int(),
        seq_lens=torch.tensor([n + before for n, before in zip(lengths, past, strict=True)], dtype=torch.int32),
        block_tables=torch.tensor([[block] for block in blocks], dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        logit_rows=starts[1:] - 1,
        max_query_len=max(lengths),
        max_seq_len=1,
    )


def conv(x: Tensor, states: Tensor, step: StepInput) -> Tensor:
    weight = torch.linspace(-1, 1, 32 * 4).view(32, 4)
    return causal_conv(x[:, :32], weight, weight[:, 0], states, step, activates=True)


def mamba2(x: Tensor, states: Tensor, step: StepInput) -> Tensor:
    rates = Rates(-torch.linspace(0.1, 2, HEADS), torch.ones(HEADS), torch.zeros(HEADS), 0.01, 1.0)
    values = x[:, :128].unflatten(1, (HEADS, CHANNELS))
    into, read = x[:, 128:192].unflatten(1, (2, GROUPS, STATE)).unbind(1)
    return ssd(values, x[:, 192:224], into, read, rates, states, step).flatten(1)


def mamba(x: Tensor, states: Tensor, step: StepInput) -> Tensor:
    decay = -torch.linspace(0.1, 2, 32 * STATE).view(32, STATE)
    dt = torch.nn.functional.softplus(x[:, 8:40])
    return selective_scan(x[:, :32], dt, x[:, 40:56], x[:, 50:66], decay, torch.ones(32), states, step)


def delta(x: Tensor, states: Tensor, step: StepInput) -> Tensor:
    q, k = (part.unflatten(1, (GROUPS, STATE)) for part in (x[:, 128:160], x[:, 160:192]))
    values = x[:, :128].unflatten(1, (HEADS, CHANNELS))
    gates = Gates(-torch.linspace(0.1, 2, HEADS), torch.ones(HEADS))
    return gated_delta_rule(q, k, values, x[:, 192:224], x[:, 224:256], gates, states, step).flatten(1)


CASES = {
    "conv": (conv, (32, 3)),
    "mamba2": (mamba2, (HEADS, CHANNELS, STATE)),
    "mamba": (mamba, (32, STATE)),
    "delta": (delta, (HEADS, STATE, CHANNELS)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Operation, Tensor]:
    operation, shape = CASES[request.param]
    states = torch.randn(9, *shape, generator=torch.Generator().manual_seed(5))
    return operation, states


def inputs(count: int) -> Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(6))


def test_rows_together_equal_each_alone(case: tuple[Operation, Tensor]) -> None:
    """Exactly, outputs and states; and no other block changes."""
    operation, states = case
    x, blocks = inputs(sum(LENGTHS)), (4, 2, 8, 0, 7)
    together = states.clone()
    out = operation(x, together, step_of(LENGTHS, PAST, blocks))
    alone = states.clone()
    parts = x.split(list(LENGTHS))
    single = [
        operation(part, alone, step_of([length], [past], [block]))
        for part, length, past, block in zip(parts, LENGTHS, PAST, blocks, strict=True)
    ]
    assert torch.equal(out, torch.cat(single))
    assert torch.equal(together, alone)
    untouched = [1, 3, 5, 6]
    assert torch.equal(together[untouched], states[untouched])


def test_a_prompt_in_one_step_equals_its_tokens(case: tuple[Operation, Tensor]) -> None:
    """A sequence that begins reads nothing of its block."""
    operation, states = case
    states.fill_(torch.nan)
    x = inputs(150)
    whole, tokens = states.clone(), states.clone()
    out = operation(x, whole, step_of([150], [0], [3]))
    single = [operation(x[t : t + 1], tokens, step_of([1], [t], [3])) for t in range(150)]
    torch.testing.assert_close(out, torch.cat(single), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole[3], tokens[3], rtol=1e-4, atol=1e-4)
