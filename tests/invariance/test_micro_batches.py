"""Steps that are computed in two parts, whose sums over ranks are awaited later, give the tokens of one device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import rank_kit
import torch
from rank_kit import ThreadCollectives, ranks_in_threads
from test_several_ranks import MODELS, engine, run
from torch import Tensor

from octavo.core.errors import ConfigError
from octavo.nn.ops.norm import rms_norm
from octavo.nn.step import StepInput
from octavo.worker.micro_batches import MicroBatches, divided

ALWAYS = ("a divided vocabulary", "windows")
TWO = {"tensor_parallel_size": 2, "enable_dbo": True, "dbo_prefill_token_threshold": 32}


class Later:
    """A sum of ranks in threads that is computed when it is awaited: until then, its memory is not what it will be."""

    awaited = 0

    def __init__(self, ranks: ThreadCollectives, x: Tensor) -> None:
        self.ranks, self.own = ranks, x.clone()
        x.fill_(float("nan"))

    def total(self) -> Tensor:
        Later.awaited += 1
        return self.ranks.all_reduce(self.own)


class NormedLater(Later):
    """Such a sum, which the norm that follows computes."""

    def normed_with(self, stream: Tensor, norm: tuple[Tensor, float], dtype: torch.dtype) -> Tensor:
        return rms_norm(stream.add_(self.total()), *norm, dtype)


class BeginningRanks(ThreadCollectives):
    """A class of its own: that a class has the method is remembered for good (`isinstance` with a protocol)."""

    kind = Later
    hidden = 1 << 20

    def most_hidden_bytes(self) -> int:
        return self.hidden

    def begin_sum(self, x: Tensor) -> Later:
        return self.kind(self, x)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch, native=False)
    monkeypatch.setattr(rank_kit, "ThreadCollectives", BeginningRanks)
    monkeypatch.setattr(Later, "awaited", 0)


@pytest.mark.parametrize(
    "model", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    takes = MicroBatches.takes
    monkeypatch.setattr(MicroBatches, "takes", lambda one, step: taken.append(takes(one, step)) or taken[-1])
    assert run(MODELS[model], **TWO) == run(MODELS[model])
    assert Later.awaited > 0
    assert True in taken
    assert False in taken


def test_tokens_of_sums_that_the_norm_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeginningRanks, "kind", NormedLater)
    assert run(MODELS["windows"], **TWO) == run(MODELS["windows"])
    assert Later.awaited > 0


def test_sums_of_whole_steps_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatches, "takes", lambda one, step: False)
    assert run(MODELS["windows"], **TWO) == run(MODELS["windows"])
    assert Later.awaited == 0


@pytest.mark.parametrize(
    ("model", "hidden", "parts"),
    [
        pytest.param("windows", 1 << 20, True, id="a dense model"),
        pytest.param("windows", 0, False, id="sums that slow what is beside them"),
        pytest.param("windows", 64, False, id="sums that are too large"),
        pytest.param("latent attention", 1 << 20, False, id="latent attention"),
    ],
)
def test_where_parts_pay_by_themselves(model: str, hidden: int, parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeginningRanks, "hidden", hidden)
    monkeypatch.setattr(MicroBatches, "takes", lambda one, step: step.num_tokens >= 32)
    assert run(MODELS[model], tensor_parallel_size=2) == run(MODELS[model])
    assert (Later.awaited > 0) == parts


@pytest.mark.slow
def test_tokens_in_a_pipeline() -> None:
    assert run(MODELS["windows"], **TWO, pipeline_parallel_size=2) == run(MODELS["windows"])


def step_of(counts: list[int], past: list[int], **more: Any) -> StepInput:
    """A step whose tensors say where each entry comes from."""
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    lens = torch.tensor([count + before for count, before in zip(counts, past, strict=True)])
    tokens = torch.arange(ends[-1])
    positions = torch.cat([torch.arange(before, before + count) for count, before in zip(counts, past, strict=True)])
    return StepInput(
        input_ids=tokens,
        positions=positions,
        query_start=torch.tensor(ends, dtype=torch.int32),
        seq_lens=lens.int(),
        block_tables=torch.arange(len(counts) * 3).view(-1, 3),
        slot_mapping=tokens + 1000,
        logit_rows=torch.tensor(ends[1:]) - 1,
        hidden_rows=torch.tensor(ends[1:]) - 1,
        max_query_len=max(counts),
        max_seq_len=int(lens.max()),
        query_lens=counts,
        past_lens=past,
        **more,
    )


@pytest.mark.parametrize(
    ("cut", "rows"),
    [(16, ([0, 1], [1, 2])), (6, ([0], [1, 2])), (20, ([0, 1, 2], [2]))],
    ids=["within a row", "between rows", "within the last row"],
)
def test_a_step_in_two_parts(cut: int, rows: tuple[list[int], list[int]]) -> None:
    step = step_of([6, 13, 4], [0, 5, 40])
    parts = divided(step, cut)
    assert torch.cat([part.slot_mapping for part in parts]).equal(step.slot_mapping)
    for part, own in zip(parts, rows, strict=True):
        assert (part.block_tables[:, 0] // 3).tolist() == own
        starts = part.query_start.tolist()
        assert starts[-1] == part.num_tokens
        assert [end - start for start, end in pairwise(starts)] == list(part.query_lens or ())
        for i, (start, end) in enumerate(pairwise(starts)):
            assert part.past_lens is not None
            positions = part.positions[start:end].tolist()
            assert positions == list(range(part.past_lens[i], int(part.seq_lens[i])))
    found = [torch.arange(part.num_tokens)[part.hidden_rows] for part in parts]
    assert torch.where(step.hidden_rows < cut, found[0], found[1] + cut).equal(step.hidden_rows)


def test_one_device_has_nothing_to_overlap() -> None:
    with pytest.raises(ConfigError, match="--enable-dbo computes while sums over ranks run"):
        engine(enable_dbo=True)
