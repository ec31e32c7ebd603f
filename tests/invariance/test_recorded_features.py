"""A feature that changes the model by request, in steps that stay recorded; and what steps send to the device.

Without a GPU, graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from toy_engine import drive, tiny_config, tokens_of
from toy_graphs import Transfers, recorded_graphs
from toy_models import QWEN3, VOCAB, behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.nn.step import StepInput
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.worker.hooks import Site, WorkerHook
from octavo.worker.runner import Runner


class Adapting(EngineHook):
    """Requests named a<n> are adapted by n."""

    name = "adapter"

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        adapted = {
            slot: int(request.spec.id[1:])
            for slot, request in zip(draft.slots, rows, strict=True)
            if request.spec.id.startswith("a")
        }
        if adapted:
            draft.payload[self.name] = adapted


class Adapter(WorkerHook):
    """Adds a vector of its own to the embeddings of a request's tokens, times the request's number."""

    name = "adapter"

    def __init__(self, *, recorded: bool = True) -> None:
        self._recorded = recorded
        self._adapts = False
        self.laid_out: list[int] = []
        self.told: list[int] = []

    def attach(self, model: Any, site: Site) -> None:
        embed, device = model.embed, site.device
        self._device = device
        self._direction = torch.linspace(-1, 1, model.spec.hidden_size, device=device.torch_device)

        def adapted(step: StepInput) -> Tensor:
            x: Tensor = embed(step)
            return x + self._factors[: step.num_tokens, None] * self._direction if self._adapts else x

        model.embed = adapted

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        self._factors = torch.zeros(max_tokens, device=self._device.torch_device)
        return {}

    def variants(self) -> Sequence[Hashable]:
        return ["adapted"] if self._recorded else []

    def variant(self, payload: dict[int, int] | None) -> Hashable | None:
        return "adapted" if payload else None

    def select(self, variant: Hashable | None) -> None:
        self._adapts = variant is not None

    def lay_out(self, plan: StepPlan, payload: dict[int, int] | None) -> None:
        self.laid_out.append(plan.id)
        if payload:
            factors = np.repeat([payload.get(slot, 0) for slot in plan.slots], plan.num_tokens).astype(np.float32)
            self._factors[: len(factors)].copy_(self._device.upload(factors))

    def after_sample(self, plan: StepPlan, output: Any) -> None:
        self.told.append(plan.id)


def engine(monkeypatch: pytest.MonkeyPatch, adapter: Adapter | None, **settings: Any) -> EngineLoop:
    engines, workers = ([], []) if adapter is None else ([Adapting()], [adapter])
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: engines)
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: workers)
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    return build_core(tiny_config(**small | settings), model_files(QWEN3))[0]


def runner_of(loop: EngineLoop) -> Runner:
    assert isinstance(loop._executor, Runner)
    return loop._executor


def requests(*names: str) -> list[GenerateRequest]:
    rng = random.Random(7)
    prompts = {name: [rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 9))] for name in ("a2", "b", "a9")}
    lengths = {"a2": 4, "b": 14, "a9": 4}
    return [
        GenerateRequest(
            id=name,
            tokens=prompts[name],
            params=SamplingParams(max_tokens=lengths[name], temperature=0, ignore_eos=True),
        )
        for name in names
    ]


@pytest.mark.parametrize(
    "recorded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["recorded", "not recorded"]
)
def test_an_adapter_by_request_leaves_steps_recorded(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tokens change, others' do not; a variant that is not recorded is computed, and nothing else is."""
    asked = requests("a2", "b", "a9")
    limits = {"max_num_batched_tokens": 20}
    on_cpu = {"device": "cpu", "attention_backend": "torch"}
    plain = tokens_of(drive(engine(monkeypatch, None, **limits, **on_cpu), asked))
    expected = tokens_of(drive(engine(monkeypatch, Adapter(), **limits, **on_cpu), asked))
    changed = {name for name, _ in expected if expected[name, 0] != plain[name, 0]}
    assert changed == {"a2", "a9"}

    replayed = recorded_graphs(monkeypatch, late=False)
    adapter = Adapter(recorded=recorded)
    loop = engine(monkeypatch, adapter, **limits, **behind(monkeypatch))
    replay = runner_of(loop).replay
    before, began = replay.count, len(adapter.told)
    assert tokens_of(drive(loop, asked)) == expected
    steps = len(adapter.told) - began
    assert adapter.laid_out[-steps:] == adapter.told[-steps:]
    if recorded:
        assert replay.count - before == steps
    else:
        assert 1 < replay.count - before < steps
    assert replayed["forward"]


def test_longer_steps_of_variants_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers are those of steps that are computed."""
    monkeypatch.setattr("octavo.worker.resident.batches.MAX_TOKENS", 16)
    monkeypatch.setattr("octavo.worker.resident.batches.MAX_VARIED_TOKENS", 32)
    params = SamplingParams(max_tokens=2, temperature=0)
    prompts = {"a3": list(range(5, 25)), "b": list(range(25, 45))}
    asked = [GenerateRequest(id=name, tokens=tokens, params=params) for name, tokens in prompts.items()]
    expected = tokens_of(drive(engine(monkeypatch, Adapter(recorded=False), **behind(monkeypatch)), asked, at_once=1))
    recorded_graphs(monkeypatch)
    loop = engine(monkeypatch, Adapter(), **behind(monkeypatch))
    replay, found, counts = runner_of(loop).replay, {}, []
    for request in asked:
        before = replay.count
        found |= tokens_of(drive(loop, [request]))
        counts.append(replay.count - before)
    assert found == expected
    assert counts == [2, 1], "a prompt of 20 tokens is recorded for the variant only"


def test_a_step_that_repeats_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads: new requests, changed block tables, the batch's layout or its slots. Downloads: the tokens."""
    recorded_graphs(monkeypatch)
    loop = engine(monkeypatch, None, **behind(monkeypatch), async_scheduling=False)
    transfers = Transfers(monkeypatch)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for i in range(2):
        loop.add(GenerateRequest(id=f"r{i}", tokens=[5 + i] * 13, params=params))
    counts = []
    while loop.busy:
        loop.step()
        counts.append(transfers.take())
    prompts, begins, *steps = counts
    assert prompts == (3, 1)
    assert begins == (1, 1)  # the batch of single tokens
    assert steps[0] == (0, 1)
    assert sorted(set(steps)) == [(0, 1), (1, 1)]
    assert steps.count((1, 1)) == 1  # both rows begin a block


def test_nothing_is_made_by_row_while_steps_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.worker.resident.slots import DeviceSlots

    recorded_graphs(monkeypatch)
    loop = engine(monkeypatch, None, **behind(monkeypatch), max_num_seqs=3)
    monkeypatch.setattr(DeviceSlots, "sample_rows", lambda *_: pytest.fail("rows were made"))
    params: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0, "min_tokens": 1, "ignore_eos": True},
    ]
    asked = [
        GenerateRequest(id=f"r{i}", tokens=[5 + i, 9], params=SamplingParams(max_tokens=4, **one))
        for i, one in enumerate(params)
    ]
    assert all(tokens_of(drive(loop, asked, at_once=3)).values())
