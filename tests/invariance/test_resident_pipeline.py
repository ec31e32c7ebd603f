"""Each stage of a pipeline records its steps; the tokens stay those of one device.

Graphs are recorded by `toy_graphs` and kernels run in Triton's interpreter, where the stages are threads.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("these stages are threads on the CPU; test_gpu_ranks.py has those of GPUs", allow_module_level=True)

from rank_kit import ThreadLink, ranks_in_threads
from test_recorded_features import Adapter, Adapting
from toy_drafter import DrafterEngine, DrafterWorker, check_same, news_of
from toy_engine import drive, strict, tiny_config, tokens_of
from toy_graphs import interpret_in_turns, recorded_graphs
from toy_models import QWEN3, VOCAB, Behind, model_files

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.models.decoder import CausalLM
from octavo.worker.hooks import Site
from octavo.worker.resident.replay import GraphReplay

MODEL = QWEN3 | {"num_hidden_layers": 3}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 1.5}, "min_tokens": 3},
    {"temperature": 0.9, "seed": 3, "top_k": 20},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 5},
]


def requests(most: int = 7) -> list[GenerateRequest]:
    rng = random.Random(6)
    made = []
    for i, sampled in enumerate(SAMPLED):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 20))]
        params = SamplingParams(max_tokens=rng.randrange(4, most), ignore_eos=True, **sampled)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=-i))
    return made


def engine(**settings: Any) -> EngineLoop:
    small = {"memory_bytes": 1 << 21, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    where = {"attention_backend": "triton", "device": "cpu", "cpu_bind": "nobind"}
    loop = build_core(tiny_config(**small | where | settings), model_files(MODEL))[0]
    return strict(loop)


@pytest.fixture(autouse=True)
def stages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    interpret_in_turns(monkeypatch)
    monkeypatch.setattr("octavo.worker.worker.select_device", lambda name: Behind())


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the steps that each kind of stage replays: all, and by the kind of batch."""
    recorded_graphs(monkeypatch)
    counts: Counter[str] = Counter()
    forward = GraphReplay.forward

    def counted(self: GraphReplay, *args: Any) -> None:
        stage = "passing on" if self._sampling is None else "sampling"
        counts[stage] += 1
        counts[f"{stage}, {type(self._taken.batches).__name__}"] += 1
        forward(self, *args)

    monkeypatch.setattr(GraphReplay, "forward", counted)
    return counts


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Collect the hidden states that stages send, and what they were then."""
    found: list[tuple[Tensor, Tensor]] = []
    send = ThreadLink.send

    def kept(self: ThreadLink, x: Tensor) -> None:
        found.append((x, x.clone()))
        send(self, x)

    monkeypatch.setattr(ThreadLink, "send", kept)
    return found


def run(asked: list[GenerateRequest], **settings: Any) -> Any:
    loop = engine(**settings)
    found = news_of(list(drive(loop, asked)))
    loop.close()
    return found


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 16},
        pytest.param({"policy": "priority", "max_num_seqs": 2}, marks=pytest.mark.slow),
        pytest.param({"async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.slow),
    ],
    ids=["prompts", "chunks", "preemption", "no overlap", "three stages"],
)
def test_every_stage_replays_its_steps(
    settings: dict[str, Any], replayed: Counter[str], sent: list[tuple[Tensor, Tensor]]
) -> None:
    expected = run(requests(), enforce_eager=True, async_scheduling=False, max_num_seqs=1)
    check_same(run(requests(), **{"pipeline_parallel_size": 2} | settings), expected)
    stages = settings.get("pipeline_parallel_size", 2)
    assert replayed["passing on"] > 10
    assert all(replayed[f"passing on, {batches}"] for batches in ("NoneType", "Ragged"))
    # Steps that report on prompts are not replayed by the last stage, which needs all hidden states.
    assert (stages - 1) * replayed["sampling"] <= replayed["passing on"]
    assert all(torch.equal(x, then) for x, then in sent), "a replay wrote to what may not have arrived yet"


@pytest.mark.slow
def test_drafts(replayed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(requests(12), enforce_eager=True, async_scheduling=False, max_num_seqs=1)
    prompts = {request.id: request.tokens for request in requests(12)}
    texts = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = DrafterEngine(3)
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [drafter])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [DrafterWorker(texts, VOCAB)])
    check_same(run(requests(12), pipeline_parallel_size=2), expected)
    assert min(drafter.accepted, drafter.rejected) > 3
    assert replayed["passing on, Drafted"] > 3


class FirstStage(Adapter):
    """Changes embeddings, which only the first stage has."""

    def attach(self, model: Any, site: Site) -> None:
        embed = model.embed
        super().attach(model, site)
        if isinstance(model, CausalLM) and model.layer_range.start:
            model.embed = embed


@pytest.mark.slow
def test_variants_of_the_model(replayed: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [Adapting()])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [FirstStage()])
    for module in ("octavo.build_worker", "rank_kit"):
        monkeypatch.setattr(f"{module}.payload_types", lambda: {Adapting.name: dict[int, int]})
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=name, tokens=[8, 9, 10], params=params) for name in ("a2", "b", "a9")]

    def tokens(**settings: Any) -> Any:
        loop = engine(**settings)
        found = tokens_of(drive(loop, asked))
        loop.close()
        return found

    expected = tokens(enforce_eager=True)
    assert len({tuple(found) for found in expected.values()}) == 3
    assert tokens(pipeline_parallel_size=2) == expected
    assert replayed["passing on"] == replayed["sampling"] > 6
