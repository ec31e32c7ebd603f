"""Layers with additions by request in native programs: a program for steps with some, beside the one for steps
without."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_additions import Additions
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, QWEN3, VOCAB, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.plan import PlanDraft, StepPlan
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.models.native import NativeDecoder
from octavo.native.bindings import Dtype, LowRank
from octavo.native.builder import ProgramBuilder
from octavo.nn.delta import Addition, Delta
from octavo.nn.linear import Linear, Projection
from octavo.nn.norm import Norm
from octavo.schedule.hooks import EngineHook
from octavo.schedule.request import Request
from octavo.worker.hooks import Site, WorkerHook
from octavo.worker.runner import Runner

NAMES = ("a0", "b0", "a1", "a2", "b1")


class Choosing(EngineHook):
    """Requests named a<n> have addition n."""

    name = "adds"

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        chosen = [int(row.spec.id[1:]) if row.spec.id.startswith("a") else -1 for row in rows]
        if max(chosen) >= 0:
            draft.payload[self.name] = chosen


class ToyDelta(Delta):
    def __init__(self, additions: Additions, of_tokens: Tensor, of_logits: Tensor) -> None:
        self.additions, self.of_tokens, self.of_logits = additions, of_tokens, of_logits
        self.num_tokens = 0

    def begin(self, x: Tensor) -> Addition:
        return ToyAddition(self, x)

    def emit(self, b: ProgramBuilder, source: int, given: Dtype, columns: int, norm: Norm | None = None) -> LowRank:
        table = self.additions.table(self.of_tokens, self.of_logits)
        b.shrink(source, given, columns, table, norm=None if norm is None else norm.kernel_args())
        return table


class ToyAddition(Addition):
    def __init__(self, delta: ToyDelta, x: Tensor) -> None:
        self.delta, self.x = delta, x

    def add_to(self, y: Tensor) -> None:
        rows = self.delta.of_tokens if len(y) == self.delta.num_tokens else self.delta.of_logits
        y.copy_(self.delta.additions.applied(self.x, y, rows[: len(y)]))


class Adding(WorkerHook):
    """Adds to every linear layer, by request."""

    name = "adds"

    def attach(self, model: Any, site: Site) -> None:
        self.model = model
        self.of_tokens, self.of_logits = (torch.full((64,), -1, dtype=torch.int32) for _ in range(2))
        generator = torch.Generator().manual_seed(3)
        self.deltas = {
            layer: self._delta(layer, generator)
            for layer in getattr(model, "source", model).modules()
            if isinstance(layer, Projection)
        }

    def _delta(self, layer: Projection, generator: torch.Generator) -> ToyDelta:
        if isinstance(layer, Linear):
            inputs, outputs = layer.parts[0].in_features, layer.sizes
        else:
            inputs, outputs = LLAMA["hidden_size"], [VOCAB]
        additions = Additions(Dtype.FLOAT, inputs, outputs, generator)
        for rank in (2, 5, 17):
            additions.add([rank] * len(outputs))
        return ToyDelta(additions, self.of_tokens, self.of_logits)

    def variants(self) -> Sequence[Hashable]:
        return ["with"]

    def variant(self, payload: Any) -> Hashable | None:
        return "with" if payload else None

    def select(self, variant: Hashable | None) -> None:
        for layer, delta in self.deltas.items():
            layer.delta = None if variant is None else delta

    def lay_out(self, plan: StepPlan, payload: Any) -> None:
        if not payload:
            return
        tokens = np.repeat(payload, plan.num_tokens)
        self.of_tokens[: len(tokens)] = torch.from_numpy(tokens)
        logits = [one for one, sampled in zip(payload, plan.samples, strict=True) if sampled]
        self.of_logits[: len(logits)] = torch.tensor(logits, dtype=torch.int32)
        for delta in self.deltas.values():
            delta.num_tokens = len(tokens)


def engine(monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any], **settings: Any) -> tuple[EngineLoop, Runner]:
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [Choosing()])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [Adding()])
    small = {"device": "cpu", "max_num_seqs": 3, "max_num_batched_tokens": 16, "threads": 2}
    loop = build_core(tiny_config(**small | settings), model_files(dict(config)))[0]
    assert isinstance(loop._executor, Runner)
    return loop, loop._executor


def requests(*names: str) -> list[GenerateRequest]:
    rng = random.Random(7)
    prompts = {name: [rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 24))] for name in NAMES}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    return [GenerateRequest(id=name, tokens=prompts[name], params=params) for name in names]


@pytest.mark.parametrize("config", [LLAMA | {"tie_word_embeddings": True}, QWEN3], ids=["tied", "untied"])
def test_requests_with_additions_and_without(config: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are those of the layers in torch, alone or together; steps of single tokens are single calls."""
    asked = requests(*NAMES)
    loop, _ = engine(monkeypatch, config, attention_backend="torch")
    expected = tokens_of(drive(loop, asked))
    loop, runner = engine(monkeypatch, config)
    model = runner._model
    assert isinstance(model, NativeDecoder)
    counts = []
    for request in asked:
        before = runner.replay.count
        assert tokens_of(drive(loop, [request])) == {(request.id, 0): expected[request.id, 0]}
        counts.append(runner.replay.count - before)
    assert set(counts) == {7}
    assert len(model._programs) == 2
    assert tokens_of(drive(loop, asked)) == expected


def test_bits_do_not_depend_on_the_rows_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of requests with and without additions, alone and together."""

    def logprobs(loop: EngineLoop, names: Sequence[str]) -> dict[str, list[float]]:
        asked = requests(*names)
        for request in asked:
            request.params.logprobs = 0
        found: dict[str, list[float]] = {name: [] for name in names}
        for delta in drive(loop, asked, at_once=3):
            assert delta.error is None, delta.error
            found[delta.id] += [entry.logprob for entry in delta.logprobs or ()]
        return found

    loop, _ = engine(monkeypatch, LLAMA)
    together = logprobs(loop, NAMES)
    assert all(len(found) == 8 for found in together.values())
    for name in NAMES:
        assert logprobs(loop, [name])[name] == together[name]


def test_new_weights_keep_the_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests("a1")
    loop, _ = engine(monkeypatch, LLAMA, seed=12)
    expected = tokens_of(drive(loop, asked))
    loop, runner = engine(monkeypatch, LLAMA)
    before = tokens_of(drive(loop, asked))
    _, other = engine(monkeypatch, LLAMA, seed=12)
    assert isinstance(runner._model, NativeDecoder)
    assert isinstance(other._model, NativeDecoder)
    runner._model.adopt(other._model)
    loop.reset_prefix_cache()
    after = tokens_of(drive(loop, asked))
    assert after == expected != before
