"""Data-parallel attention: ranks that divide requests and experts give the tokens of one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_kit import ranks_in_threads
from test_drafts import requests as draft_requests
from test_expert_parallel import FAMILIES
from test_invariance import requests
from test_rank import life
from test_recurrent_families import FAMILIES as RECURRENT
from test_several_ranks import engine, run
from toy_drafter import DrafterEngine, beside_others, check_same, news_of
from toy_engine import drive, tokens_of
from toy_models import LLAMA, model_files

from octavo.core.errors import ConfigError
from octavo.nn.row_exchange import RowExchange
from octavo.replay import replay
from octavo.worker.hooks import Hooks, Reserved, WorkerHook
from octavo.worker.own_rows import check_features
from octavo.worker.worker import Worker

MODELS: dict[str, dict[str, Any]] = {
    "latent attention": FAMILIES["DeepseekV3ForCausalLM"] | {"architectures": ["DeepseekV3ForCausalLM"]},
    "key-value heads": FAMILIES["Qwen2MoeForCausalLM"] | {"architectures": ["Qwen2MoeForCausalLM"]},
    "windows and sinks": FAMILIES["GptOssForCausalLM"] | {"architectures": ["GptOssForCausalLM"]},
    "a layer of experts in two": FAMILIES["Llama4ForCausalLM"] | {"architectures": ["Llama4ForCausalLM"]},
}
MODELS["recurrent layers"] = RECURRENT["Qwen3NextForCausalLM"] | {"architectures": ["Qwen3NextForCausalLM"]}
MODELS["recurrent layers"] |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS["recurrent layers"] |= {"shared_expert_intermediate_size": 40, "initializer_range": 0.3}
MODELS = {name: config | {"model_type": "any"} for name, config in MODELS.items()}
LATENT, GROUPED = "latent attention", "key-value heads"
FEW: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 6}
TWO: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
CROWDED = {"async_scheduling": True, "max_num_batched_tokens": 8, "num_blocks": 11}
SENT = {"all2all_backend": "all_to_all"}


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)


SLOW = [(name, more) for name in MODELS for more in ({}, SENT, {"enable_prefix_caching": False})]
SLOW += [("windows and sinks", CROWDED | {"num_blocks": 18}), ("recurrent layers", CROWDED | {"num_blocks": 14})]
QUICK: list[tuple[str, dict[str, Any]]] = [(LATENT, CROWDED), (GROUPED, CROWDED | SENT)]


@pytest.mark.parametrize(("name", "more"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_tokens(name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Sequence[int]] = []
    gathered = RowExchange.gathered

    def noting(exchange: RowExchange, x: torch.Tensor) -> torch.Tensor:
        counts.append(tuple(exchange.counts or ()))
        return gathered(exchange, x)

    monkeypatch.setattr(RowExchange, "gathered", noting)
    loop = engine(MODELS[name], **FEW, **TWO, **more)
    found = tokens_of(drive(loop, requests()))
    stats = loop.stats()
    loop.close()
    assert found == run(MODELS[name], **FEW)
    assert any(min(one) > 0 for one in counts if one)
    assert any(min(one) == 0 < max(one) for one in counts if one)
    assert stats.prefix_cache_hits > 0 or name == "recurrent layers"  # whose states are kept every 256 tokens
    if "num_blocks" in more:
        assert stats.num_preemptions > 0
        assert stats.num_blocks == 2 * more["num_blocks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert run(MODELS[name], **FEW, **TWO) == run(MODELS[name], **FEW)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks_than_requests(size: int) -> None:
    config = MODELS[LATENT]
    loops = [engine(config, **FEW, **more) for more in (TWO | {"data_parallel_size": size}, {})]
    found = [tokens_of(drive(loop, requests()[:2])) for loop in loops]
    for loop in loops:
        loop.close()
    assert found[0] == found[1]


def test_drafts_log_probabilities_and_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's log-probabilities need the hidden states of all its tokens; a row with drafts, several."""
    asked = draft_requests()[:6]
    alone = engine(MODELS[LATENT], **FEW)
    expected = news_of(list(drive(alone, asked)))
    alone.close()
    prompts = {request.id: request.tokens for request in asked}
    known = [prompts[name] + tokens for (name, _), (tokens, *_) in expected.items()]
    drafter = DrafterEngine()
    beside_others(monkeypatch, drafter, known)
    loop = engine(MODELS[LATENT], **FEW, **TWO)
    for request in requests()[:3]:
        loop.add(request)
    for _ in range(4):
        loop.step()
    for request in requests()[:3]:
        loop.abort(request.id)
    check_same(news_of(list(drive(loop, asked))), expected)
    assert drafter.accepted > 10
    assert drafter.rejected > 10
    loop.close()


def test_a_record_is_computed_again_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = engine(MODELS[LATENT], **FEW, **TWO, record_steps=str(tmp_path / "steps"))
    count = sum(map(len, tokens_of(drive(loop, requests())).values()))
    loop.close()
    monkeypatch.setattr("octavo.replay.model_files", lambda _: model_files(MODELS[LATENT]))
    report = replay(tmp_path / "steps")
    assert report.difference is None
    assert report.tokens >= count


@pytest.mark.slow
def test_sleep_and_other_weights() -> None:
    few, where = FEW | {"config": MODELS[GROUPED]}, {"device": "cpu", "cpu_bind": "nobind"}
    assert life(**few, **where, **TWO) == life(**few, **where)


@pytest.mark.features("lora")
def test_adapters_are_refused_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.worker.load_weights", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ConfigError, match="adapters don't work with data-parallel attention"):
        engine(MODELS[GROUPED], **FEW, **TWO, enable_lora=True)


@pytest.mark.features("host_cache")
def test_blocks_in_the_hosts_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(host_cache\) don't work with data-parallel attention"):
        engine(MODELS[GROUPED], **FEW, **TWO, kv_offloading_size=0.01)


def test_features_with_weights_of_their_own_are_refused() -> None:
    """They would compute all rows, with the block numbers of each rank's own requests."""

    class Loading(WorkerHook):
        def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
            return Reserved()

    with pytest.raises(ConfigError, match="models and heads that draft don't work with data-parallel attention"):
        check_features(Hooks([Loading()]))


def test_what_can_not_be_combined_is_refused() -> None:
    config = MODELS[GROUPED]
    for more in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"enable_dbo": True}):
        with pytest.raises(ConfigError, match="each rank has whole attention layers and some of the experts"):
            engine(config, **TWO, **more)
    with pytest.raises(ConfigError, match="--enable-expert-parallel: tiny has no experts"):
        engine(LLAMA, **TWO)
    with pytest.raises(ConfigError, match="5 experts can't be divided over 6 ranks"):
        engine(config, **TWO | {"data_parallel_size": 6})
