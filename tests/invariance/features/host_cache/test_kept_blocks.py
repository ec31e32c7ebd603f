"""Blocks that come back from the host's memory give the tokens that computing them gives, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from rank_kit import PIPELINE, TWO_RANKS, ranks_in_threads
from toy_engine import RENEWALS, drive, renew, tiny_config, tokens_of
from toy_models import LATENT, LLAMA, QWEN3, VOCAB, behind, model_files
from toy_recurrent import Hybrid

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.features.host_cache.worker import HostPages

WINDOWED = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
MIXED = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "max_window_layers": 1,
}
"""Full and windowed layers."""
MUCH = {"kv_offloading_size": 0.01}
Tokens = dict[tuple[str, int], list[int]]


def requests(rounds: int = 2) -> list[GenerateRequest]:
    """Conversations that take turns: each continues after all others have."""
    rng = random.Random(5)
    talks = [[rng.randrange(4, VOCAB) for _ in range(rng.randrange(20, 60))] for _ in range(6)]
    made = []
    for turn in range(rounds):
        for i, talk in enumerate(talks):
            drawn: dict[str, Any] = {"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0}
            params = SamplingParams(max_tokens=rng.randrange(4, 20), ignore_eos=True, **drawn)
            made.append(GenerateRequest(id=f"{turn}-{i}", tokens=list(talk), params=params))
            talk += [rng.randrange(4, VOCAB) for _ in range(10)]
    return made


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    limits = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 16}
    return build_core(tiny_config(**limits | settings), model_files(config))[0]


def run(loop: EngineLoop, asked: list[GenerateRequest], *, close: bool = True) -> tuple[Tokens, EngineStats]:
    tokens = tokens_of(drive(loop, asked, at_once=1))
    while loop._scheduler.storing:
        loop.idle()
    stats = loop.stats()
    if close:
        loop.close()
    return tokens, stats


def places_of(loop: EngineLoop) -> int:
    found: int = min(loop.worker.call_hook("host_cache", "places", {}).result(60))
    loop.close()
    return found


def metrics(stats: EngineStats) -> dict[str, float]:
    return {metric.name: metric.values[""] for metric in stats.features if metric.name.startswith("host_kv")}


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fastest": (LLAMA, {}),
    "fastest, windowed": (WINDOWED, {"num_blocks": 12}),
    "three groups": (MIXED, {"num_blocks": 48, "attention_backend": "torch"}),
    "int8": (LLAMA, {"kv_cache_dtype": "int8"}),
    "latent": (LATENT, {}),
}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", MODELS)
def test_evicted_blocks_come_back(name: str, overlap: bool) -> None:
    """The device has room for one or two conversations at a time, so that requests are also preempted."""
    config, settings = MODELS[name]
    settings = {**settings, "async_scheduling": overlap}
    expected, without = run(engine(config, **settings), requests())
    tokens, stats = run(engine(config, **settings, **MUCH), requests())
    assert tokens == expected
    assert stats.blocks_loaded > 0
    assert stats.prompt_tokens_computed < without.prompt_tokens_computed
    assert stats.loads_failed == stats.loads_late == 0
    assert metrics(stats)["host_kv_blocks"] == stats.blocks_stored
    assert metrics(stats)["host_kv_blocks_dropped"] == 0


def test_states_of_recurrent_layers_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.models.implementation.CausalLM", Hybrid)
    config = LLAMA | {"num_hidden_layers": 4}
    settings = {"attention_backend": "torch", "num_blocks": 24}
    expected, _ = run(engine(config, **settings), requests(3))
    tokens, stats = run(engine(config, **settings, **MUCH), requests(3))
    assert tokens == expected
    assert stats.blocks_loaded > 0
    assert stats.loads_failed == 0


def test_little_memory_keeps_what_was_used_last() -> None:
    """Pages leave it as others come, and none is missing when it is asked for."""
    expected, _ = run(engine(), requests(4))
    bytes_of_page = int(MUCH["kv_offloading_size"] * 2**30) // (places_of(engine(**MUCH)) + 1)
    tokens, stats = run(engine(kv_offloading_size=(bytes_of_page + 64) * 24 / 2**30), requests(4))
    assert tokens == expected
    found = metrics(stats)
    assert found["host_kv_blocks"] <= found["host_kv_blocks_most"] < 24
    assert found["host_kv_blocks_dropped"] > 0
    assert stats.blocks_loaded > 0
    assert stats.loads_failed == 0


@pytest.mark.parametrize("how", RENEWALS)
def test_what_may_be_of_other_weights_is_forgotten(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are free again, those of stores that had not ended, too."""
    halves: list[HostPages] = []
    attach = HostPages.attach
    monkeypatch.setattr(HostPages, "attach", lambda self, *of: (halves.append(self), attach(self, *of))[1])
    asked = requests(1)
    expected, _ = run(engine(), asked)
    loop = engine(enable_sleep_mode=True, **MUCH)
    tokens_of(drive(loop, asked, at_once=1))
    renew(loop, how)
    before = loop.stats().blocks_loaded
    tokens, stats = run(loop, asked, close=False)
    assert tokens == expected
    assert stats.blocks_loaded == before
    places = halves[-1]._pages.places
    assert len(places._of) + len(places._free) == places_of(loop)
    assert len(places._of) == metrics(stats)["host_kv_blocks"]


@pytest.mark.parametrize(
    "settings", [pytest.param(TWO_RANKS, id="tp"), pytest.param(PIPELINE, id="pp", marks=pytest.mark.slow)]
)
def test_each_rank_keeps_its_part_of_a_block(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_in_threads(monkeypatch)
    config = LLAMA | {"vocab_size": VOCAB + 1}
    expected, _ = run(engine(config, device="cpu"), requests())
    tokens, stats = run(engine(config, **settings, **MUCH), requests())
    assert tokens == expected
    assert stats.blocks_loaded > 0
    assert stats.loads_failed == 0


def test_where_the_state_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's runner, in Triton's interpreter without one."""
    pytest.importorskip("triton")
    small = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "num_blocks": 4, "max_model_len": 48}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    talks = [list(range(4 + i, 40 + i)) for i in (0, 9)]
    asked = [GenerateRequest(id=f"{turn}{i}", tokens=talks[i], params=params) for turn in "ab" for i in (0, 1)]
    tokens, stats = run(engine(QWEN3, **small, **behind(monkeypatch), **MUCH), asked)
    assert stats.blocks_loaded > 0
    assert [tokens[f"a{i}", 0] for i in (0, 1)] == [tokens[f"b{i}", 0] for i in (0, 1)]


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        pytest.param(LLAMA, {}, id="fastest"),
        pytest.param(MIXED, {"num_blocks": 48, "attention_backend": "torch"}, id="three groups"),
        pytest.param(LATENT, {"attention_backend": "torch"}, id="latent"),
        pytest.param(LLAMA | {"vocab_size": VOCAB + 1}, TWO_RANKS, id="tp"),
    ],
)
def test_files_outlast_the_engine(
    config: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = settings
    if settings is TWO_RANKS:
        ranks_in_threads(monkeypatch)
        alone = {"device": "cpu"}
    expected, _ = run(engine(config, **alone), requests())
    kept: dict[str, Any] = MUCH | {"kv_offloading_path": str(tmp_path / "kv")}
    tokens, before = run(engine(config, **settings, **kept), requests())
    assert tokens == expected
    tokens, after = run(engine(config, **settings, **kept), requests())
    assert tokens == expected
    assert after.blocks_loaded > before.blocks_loaded
    assert after.loads_failed == 0
    assert metrics(after)["host_kv_blocks"] >= metrics(before)["host_kv_blocks"]


def test_an_engine_that_is_closed_keeps_what_is_on_its_way(tmp_path: Path) -> None:
    kept: dict[str, Any] = MUCH | {"kv_offloading_path": str(tmp_path)}
    asked = requests(1)[:1]
    loop = engine(**kept)
    expected = tokens_of(drive(loop, asked))
    loop.close()
    tokens, stats = run(engine(**kept), asked)
    assert tokens == expected
    assert stats.blocks_loaded == (len(asked[0].tokens) - 1) // 16


def test_files_of_other_weights_are_not_used(tmp_path: Path) -> None:
    kept: dict[str, Any] = MUCH | {"kv_offloading_path": str(tmp_path)}
    asked = requests(1)
    run(engine(**kept), asked)
    expected, _ = run(engine(seed=7), asked)
    tokens, stats = run(engine(seed=7, **kept), asked)
    assert tokens == expected
    assert stats.blocks_loaded == 0


def test_it_needs_prefix_caching() -> None:
    with pytest.raises(ConfigError, match=r"--kv-offloading-size 0\.01 needs prefix caching"):
        engine(enable_prefix_caching=False, **MUCH)
    run(engine(enable_prefix_caching=False, kv_offloading_size=0), requests(1)[:1])


def test_steps_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-steps can't be used with --kv-offloading-size"):
        engine(record_steps=str(tmp_path), **MUCH)
