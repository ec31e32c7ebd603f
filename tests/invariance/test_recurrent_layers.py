"""Recurrent layers give the tokens of a plain computation, through chunks, prefix hits, forks and preemption."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from toy_drafter import DrafterEngine, DrafterWorker, with_drafter
from toy_engine import drive, tiny_config, tokens_of
from toy_models import LLAMA, VOCAB, model_files
from toy_recurrent import SNAPSHOT, Hybrid, Plain, plain_greedy

from octavo.build import build_core
from octavo.core.cache_groups import FULL, CacheGroup, GroupKind
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.models.load import open_checkpoint
from octavo.models.load.weights import load_weights
from octavo.models.registry import spec_of
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.parallel.stage import Stage
from octavo.worker.states import check_drafts

CONFIG = LLAMA | {"num_hidden_layers": 4}
WINDOWED = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"async_scheduling": True},
    "chunked prefill": {"max_num_batched_tokens": 20},
    "no prefix cache": {"enable_prefix_caching": False},
    "native attention": {"attention_backend": "native"},
    "preemption": {"num_blocks": 26, "max_num_seqs": 8, "max_model_len": 130, "max_num_batched_tokens": 20},
}


def engine(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] = CONFIG, **settings: Any) -> EngineLoop:
    monkeypatch.setattr("octavo.models.implementation.CausalLM", Hybrid)
    chosen = {"attention_backend": "torch", "max_model_len": 160, "max_num_seqs": 4, "async_scheduling": False}
    loop, _ = build_core(tiny_config(**chosen | settings), model_files(config))
    return loop


def requests() -> list[GenerateRequest]:
    rng = random.Random(4)
    prefix = [rng.randrange(4, VOCAB) for _ in range(40)]
    made = []
    for i in range(8):
        prompt = prefix[: rng.choice([0, 40])] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(max_tokens=rng.randrange(8, 40), top_k=1, ignore_eos=True, n=1 + (i % 3 == 2))
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


@cache
def truth(windowed: bool = False) -> dict[str, list[int]]:
    """Request -> its tokens, each computed from the whole sequence, without any state."""
    files = model_files(WINDOWED if windowed else CONFIG)
    device = torch.device("cpu")
    schemes = everywhere(Unquantized, torch.float32, device)
    model = Plain(Build(torch.float32, device, ReferenceAttention(), schemes), spec_of(files.config))
    load_weights(model, open_checkpoint(files, "dummy", 11))
    return {one.id: plain_greedy(model, one.tokens, one.params.max_tokens or 0) for one in requests()}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_a_plain_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = engine(monkeypatch, **SETTINGS[name])
    found = tokens_of(drive(loop, requests(), at_once=8 if name == "preemption" else 2))
    stats = loop.stats()
    loop.close()
    assert all(tokens == truth()[request] for (request, _), tokens in found.items())
    assert len(found) == sum(request.params.n for request in requests())
    assert (stats.num_preemptions > 0) == (name == "preemption")
    assert (stats.prefix_cache_hits > 0) or name == "no prefix cache"


def test_beside_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers, full attention and windows: three kinds of groups over one pool."""
    loop = engine(monkeypatch, WINDOWED, num_blocks=120)
    found = tokens_of(drive(loop, requests()))
    loop.close()
    assert all(tokens == truth(windowed=True)[request] for (request, _), tokens in found.items())


def test_a_prefix_is_found_where_a_chunk_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of a prompt leave a state each; a second request goes on from the last one within its prefix."""
    loop = engine(monkeypatch, max_num_batched_tokens=40)
    prompt = list(range(4, 64))
    params = SamplingParams(max_tokens=4, temperature=0)
    alone = tokens_of(drive(loop, [GenerateRequest(id="a", tokens=prompt, params=params)]))
    before = loop.stats().prefix_cache_hits
    assert before == 0
    again = tokens_of(drive(loop, [GenerateRequest(id="b", tokens=prompt, params=params)]))
    assert again["b", 0] == alone["a", 0]
    assert loop.stats().prefix_cache_hits - before == len(prompt) // SNAPSHOT * SNAPSHOT
    longer = GenerateRequest(id="c", tokens=[*prompt[:40], *reversed(prompt)], params=params)
    hits = loop.stats().prefix_cache_hits
    drained = tokens_of(drive(loop, [longer]))
    assert drained["c", 0]
    assert loop.stats().prefix_cache_hits - hits == 32
    fork = GenerateRequest(id="d", tokens=[7] * 40, params=SamplingParams(max_tokens=4, top_k=1, n=2))
    hits = loop.stats().prefix_cache_hits
    forked = tokens_of(drive(loop, [fork]))
    assert forked["d", 0] == forked["d", 1]
    assert loop.stats().prefix_cache_hits - hits == 32
    loop.close()


def test_a_state_takes_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.implementation.CausalLM", Hybrid)
    settings = {"max_model_len": 200, "max_num_seqs": 1, "attention_backend": "torch", "enable_prefix_caching": False}
    loop, info = build_core(tiny_config(**settings), model_files(CONFIG))
    assert info.kv_groups == 2
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    loop.add(GenerateRequest(id="long", tokens=[5] * 20, params=params))
    most = 0
    while loop.busy:
        loop.step()
        most = max(most, loop.stats().num_blocks_used)
    loop.close()
    assert most <= 11 + 2


@pytest.mark.parametrize("name", [*SETTINGS, "depth 2"])
def test_rejected_drafts_leave_no_trace_in_a_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DrafterEngine()
    prompts = {one.id: one.tokens for one in requests()}
    with_drafter(monkeypatch, drafter, DrafterWorker([prompts[key] + text for key, text in truth().items()], VOCAB))
    fewer = {"num_blocks": 18} if name == "preemption" else {}
    loop = engine(monkeypatch, **SETTINGS.get(name, {"depth": 2}) | fewer)
    found = tokens_of(drive(loop, requests(), at_once=8 if name == "preemption" else 2))
    stats = loop.stats()
    loop.close()
    assert all(tokens == truth()[request] for (request, _), tokens in found.items())
    assert len(found) == sum(request.params.n for request in requests())
    assert drafter.accepted > 30
    assert drafter.rejected > 30
    assert (stats.num_preemptions > 0) == (name == "preemption")


def test_all_right_drafts_save_steps_and_all_wrong_ones_cost_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [one for one in requests() if one.id == "r0"]
    text = asked[0].tokens + truth()["r0"]
    steps = {}
    for right in (1.0, 0.0):
        with_drafter(monkeypatch, DrafterEngine(), DrafterWorker([text], VOCAB, right))
        loop = engine(monkeypatch)
        assert tokens_of(drive(loop, asked))["r0", 0] == truth()["r0"]
        steps[right] = loop.stats().num_steps
        loop.close()
    assert steps[1.0] < 0.7 * len(truth()["r0"])
    assert len(truth()["r0"]) <= steps[0.0] <= len(truth()["r0"]) + 2


def test_a_pipeline_refuses_drafts() -> None:
    groups = (*FULL, CacheGroup(GroupKind.STATE))
    check_drafts(groups, 0, Stage(0, 2), resident=False)
    check_drafts(FULL, 2, Stage(0, 2), resident=False)
    check_drafts(groups, 2, Stage(0, 1), resident=False)
    with pytest.raises(ConfigError, match=r"recurrent layers, .* in a pipeline"):
        check_drafts(groups, 2, Stage(0, 2), resident=False)


def test_a_state_larger_than_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--block-size 4 gives a layer 1024 bytes .* takes 2048\. Set .* least 16"):
        engine(monkeypatch, block_size=4)
