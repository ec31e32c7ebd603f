"""A model divided into the stages of a pipeline gives the tokens of one device, whatever else the engine does."""

from __future__ import annotations

from typing import Any

import pytest
from rank_kit import ranks_in_threads
from test_drafts import requests as drafted_requests
from test_invariance import Faulty, requests
from test_rank import life
from test_recurrent_families import FAMILIES
from test_several_ranks import EVEN, MODELS, QWEN3_NEXT, engine, run, scored, scores_of
from toy_drafter import DrafterEngine, DrafterWorker, check_same, news_of
from toy_engine import drive, tokens_of
from toy_models import LLAMA, VOCAB

from octavo.core.errors import ConfigError
from octavo.core.plan import StepPlan
from octavo.models.stages import balanced

LONGER = LLAMA | EVEN | {"num_hidden_layers": 3}
TWO_LAYERS = {"num_hidden_layers": 2}
SLOW = pytest.mark.slow
CROWDED = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_blocks": 12, "max_model_len": 160}
"""Chunks and preemption."""


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LONGER, {"pipeline_parallel_size": 3}),
        (LONGER, {"pipeline_parallel_size": 3, **CROWDED}),
        (LONGER, {"pipeline_parallel_size": 2, "attention_backend": "torch", **CROWDED}),
        (LONGER, {"pipeline_parallel_size": 2, "pipeline_layers": (1, 2), "enable_prefix_caching": False}),
        (LONGER, {"pipeline_parallel_size": 2, "async_scheduling": True, "tensor_parallel_size": 2}),
        (LONGER, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, **CROWDED}),
        pytest.param(LONGER, {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8"}, marks=SLOW),
        *(
            pytest.param(model | TWO_LAYERS, {"pipeline_parallel_size": 2}, marks=() if name == "windows" else SLOW)
            for name, model in MODELS.items()
        ),
    ],
)
def test_tokens(config: dict[str, Any], settings: dict[str, Any]) -> None:
    rest = {name: value for name, value in settings.items() if "parallel" not in name and name != "pipeline_layers"}
    assert run(config, **settings) == run(config, **rest)


@pytest.mark.parametrize(
    "name", ["BambaForCausalLM", *(pytest.param(n, marks=SLOW) for n in ("Lfm2ForCausalLM", QWEN3_NEXT))]
)
def test_stages_share_block_tables_of_layers_of_several_kinds(name: str) -> None:
    config = FAMILIES[name] | {"architectures": [name], "model_type": "any", "initializer_range": 0.3}
    few = {"max_model_len": 128, "max_num_seqs": 4}
    assert run(config, pipeline_parallel_size=2, **few) == run(config, **few)


def test_log_probabilities() -> None:
    alone, divided = (
        sorted(scored(**size), key=lambda delta: delta.id) for size in ({}, {"pipeline_parallel_size": 2})
    )
    for one, other in zip(alone, divided, strict=True):
        assert (one.id, one.tokens) == (other.id, other.tokens)
        for mine, its in zip(scores_of(one), scores_of(other), strict=True):
            assert mine.top_ids == its.top_ids
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def test_sleep_and_other_weights() -> None:
    where = {"device": "cpu", "cpu_bind": "nobind"}
    assert life(pipeline_parallel_size=2, **where) == life(**where)


def test_a_step_that_fails_in_between_changes_no_tokens() -> None:
    loop = engine(LONGER, pipeline_parallel_size=3)
    loop._executor = Faulty(loop._executor, 9)
    assert tokens_of(drive(loop, requests())) == run(LONGER)
    loop.close()


def test_stages_compute_different_requests_at_once() -> None:
    """While requests decode, as many steps are in flight as there are stages, and none has a request of another."""
    loop = engine(LONGER, pipeline_parallel_size=3)
    launched: list[StepPlan] = []
    most = []
    forward = loop._executor.forward

    def observed(plan: StepPlan) -> Any:
        flying = [step.plan for step in loop._flight]
        decoding = [slot for one in [*flying, plan] if max(one.num_tokens) == 1 for slot in one.slots]
        assert len(decoding) == len(set(decoding))
        most.append(1 + len(flying))
        launched.append(plan)
        return forward(plan)

    loop._executor.forward = observed  # type: ignore[method-assign]
    asked = [request for request in requests() if request.params.n == 1][:6]
    tokens_of(drive(loop, asked, at_once=6))
    decodes = [plan for plan in launched if max(plan.num_tokens) == 1]
    assert max(most) == 3
    assert {len(plan.slots) for plan in decodes if len(plan.slots) > 2} == set()
    loop.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        pytest.param({"pipeline_parallel_size": 3, **CROWDED}, marks=SLOW),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=SLOW),
    ],
)
def test_drafts_change_nothing(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage proposes and verifies; the others learn of both by the next plans."""
    config = LONGER | {"vocab_size": VOCAB + 1}
    rest = {name: value for name, value in settings.items() if "parallel" not in name}
    loop = engine(config, **rest)
    expected = news_of(list(drive(loop, drafted_requests())))
    loop.close()
    prompts = {request.id: request.tokens for request in drafted_requests()}
    texts = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = DrafterEngine()
    monkeypatch.setattr("octavo.build.build_engine_halves", lambda _: [drafter])
    monkeypatch.setattr("octavo.build_worker.build_worker_halves", lambda _: [DrafterWorker(texts, VOCAB)])
    loop = engine(config, **settings)
    check_same(news_of(list(drive(loop, drafted_requests()))), expected)
    assert drafter.accepted > 50
    assert drafter.rejected > 20
    loop.close()


def test_layers_are_divided_by_their_bytes() -> None:
    assert balanced([10, 10, 10, 10], 2) == [2, 2]
    assert balanced([30, 10, 10, 10, 10, 10], 2) == [2, 4]
    assert balanced([10, 10, 10, 40], 3) == [2, 1, 1]
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 3: the model has 2 layers"):
        balanced([1, 1], 3)


def test_more_stages_than_layers_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.build_worker.RankGroup", None)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 40: the model has 3 layers"):
        engine(LONGER, pipeline_parallel_size=40)


@pytest.mark.parametrize("layers", [(3,), (2, 2), "1,1,1"])
def test_layers_that_do_not_add_up_are_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-layers .* does not divide 3 layers over 2 stages"):
        engine(LONGER, pipeline_parallel_size=2, pipeline_layers=layers)
