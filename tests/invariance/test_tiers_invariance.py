"""Pages that were kept in a tier give the tokens that computing them gives, bit for bit.

Engines without an attention backend run on a GPU if there is one, with recorded steps and pages that are copied beside
them; else in native programs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rank_kit import CONTEXTS, PIPELINE, TWO_RANKS, ranks_in_threads
from shelf_kit import TOYS
from test_cache_groups_invariance import MIXED, WINDOWED, replay_of
from toy_engine import GPU, drive, tiny_config, tokens_of
from toy_models import LLAMA, QWEN3, VOCAB, behind, model_files
from toy_recurrent import Hybrid

import octavo.features
import octavo.replay
from octavo.build import build_core
from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError, UnsupportedError
from octavo.core.params import SamplingParams
from octavo.core.pausing import PauseMode, SleepTag
from octavo.core.request import GenerateRequest
from octavo.core.stats import EngineStats
from octavo.engine.loop import EngineLoop
from octavo.engine.rank_process import RankProcess

Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The feature stands among the others; its dictionary is empty before and after."""
    monkeypatch.setattr(octavo.features, "__path__", [*octavo.features.__path__, str(TOYS)])
    monkeypatch.setattr(octavo.features, "FEATURES", (*octavo.features.FEATURES, "shelf"))
    clear()
    yield
    clear()


def clear() -> None:
    from octavo.features.shelf.engine import INDEX  # type: ignore[import-not-found]
    from octavo.features.shelf.worker import PAGES  # type: ignore[import-not-found]

    INDEX.clear()
    PAGES.clear()


def forget_pages() -> None:
    """The worker half loses what the engine half believes it has."""
    from octavo.features.shelf.worker import PAGES

    PAGES.clear()


def requests(count: int = 6, length: int = 64) -> list[GenerateRequest]:
    rng = random.Random(3)
    prefix = [rng.randrange(4, VOCAB) for _ in range(length)]
    made = []
    for i in range(count):
        prompt = prefix[: length if i % 3 else 0] + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 30))]
        drawn = {"temperature": 0.8, "seed": i, "n": 2} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=rng.randrange(10, 40), ignore_eos=True, **drawn)
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params))
    return made


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    limits = {"max_model_len": 160, "max_num_seqs": 16, "max_num_batched_tokens": 48}
    return build_core(tiny_config(**limits | settings), model_files(config))[0]


def settled(loop: EngineLoop) -> None:
    """Wait until all that was computed is kept."""
    while loop._scheduler.storing:
        loop.idle()


def run(loop: EngineLoop, asked: list[GenerateRequest], *, close: bool = True) -> tuple[Tokens, EngineStats]:
    tokens = tokens_of(drive(loop, asked, at_once=1))
    settled(loop)
    stats = loop.stats()
    if close:
        loop.close()
    return tokens, stats


def plain(config: dict[str, Any] = LLAMA, **settings: Any) -> Tokens:
    """What an engine without tiers gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(octavo.features, "FEATURES", octavo.features.FEATURES[:-1])
        loop = engine(config, **settings)
        assert loop._scheduler._tiers is None
        return run(loop, requests())[0]


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fastest": (LLAMA, {}),
    "fastest, windowed": (WINDOWED, {}),
    "fastest, three groups": (MIXED, {}),
    "torch": (LLAMA, {"attention_backend": "torch"}),
    "three groups": (MIXED, {"attention_backend": "torch"}),
    "bfloat16": (LLAMA, {"dtype": "bfloat16"}),
    "int8": (LLAMA, {"kv_cache_dtype": "int8"}),
    "int8, torch": (LLAMA, {"kv_cache_dtype": "int8", "attention_backend": "torch"}),
}


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_engine_goes_on_from_what_the_first_has_computed(name: str, overlap: bool) -> None:
    config, settings = MODELS[name]
    settings = {**settings, "async_scheduling": overlap}
    expected = plain(config, **settings)
    first, stats = run(engine(config, **settings), requests())
    assert first == expected
    assert stats.blocks_stored > 0
    assert stats.blocks_loaded == 0
    loop = engine(config, **settings)
    replay = replay_of(loop, settings)
    recorded = replay.count
    again, stats = run(loop, requests(), close=False)
    assert again == expected
    assert stats.blocks_loaded > 0
    assert replay.count > recorded or settings.get("attention_backend") == "torch"
    loop.close()
    rest = [len(one.tokens) - (len(one.tokens) - 1) // 16 * 16 for one in requests()]
    choices = sum(one.params.n - 1 for one in requests())  # each computes the prompt's last token again
    more = stats.prompt_tokens_computed - sum(rest) - choices
    # A choice does not share a window that has moved on; it goes on from the last block that is cached.
    assert 0 <= more <= (choices * 16 if config is not LLAMA else 0)
    assert stats.loads_failed == stats.loads_late == stats.blocks_not_stored == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_states_of_recurrent_layers_come_back(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keys and values beside them, where a state was kept for others."""
    monkeypatch.setattr("octavo.models.implementation.CausalLM", Hybrid)
    config, settings = LLAMA | {"num_hidden_layers": 4}, {"attention_backend": "torch", "async_scheduling": overlap}
    expected = plain(config, **settings)
    first, _ = run(engine(config, **settings), requests())
    again, stats = run(engine(config, **settings), requests())
    assert first == again == expected
    assert stats.blocks_loaded > 0
    assert stats.prompt_tokens_cached > 0
    assert stats.loads_failed == 0


def test_tight_memory_brings_pages_back() -> None:
    """Evicted, preempted, in chunks, at depth 1."""
    settings = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 8, "async_scheduling": True}
    expected = plain(**settings)
    loop = engine(**settings)
    tokens, _ = run(loop, requests(), close=False)
    again, stats = run(loop, requests())
    assert tokens == again == expected
    assert stats.blocks_loaded > 0
    assert stats.blocks_evicted > 0


def test_other_weights_find_nothing() -> None:
    run(engine(seed=1), requests())
    _, stats = run(engine(seed=2), requests())
    assert stats.blocks_loaded == 0
    _, stats = run(engine(seed=1, kv_cache_dtype="fp8" if GPU else "int8"), requests())
    assert stats.blocks_loaded == 0


def test_weights_that_were_replaced_find_their_own_pages() -> None:
    """Those with a name find them again; after an update that keeps the cache, pages are of nobody else's use."""
    loop = engine()

    def update(version: str | None, *, flush: bool = True) -> int:
        loop.pause(PauseMode.KEEP)
        loop.update_weights(loop.check_weights().stage_weights(None, "dummy"), version, flush_cache=flush)
        loop.resume()
        before = loop.stats().blocks_loaded
        run(loop, requests(), close=False)
        return loop.stats().blocks_loaded - before

    run(loop, requests(), close=False)
    assert update("mine") == 0
    assert update(None) == 0
    assert update("mine") > 0
    assert update("mine", flush=False) == 0
    assert update(None) == 0


def test_after_a_sleep_pages_come_from_the_tier() -> None:
    expected = plain()
    loop = engine(enable_sleep_mode=True)
    run(loop, requests(), close=False)
    loop.pause(PauseMode.KEEP)
    loop.sleep(2)
    loop.idle()
    loop.wake_up(list(SleepTag))
    before = loop.stats().blocks_loaded
    assert run(loop, requests(), close=False)[0] == expected
    assert loop.stats().blocks_loaded > before
    loop.close()


def test_pages_that_are_gone_are_computed() -> None:
    expected = plain()
    loop = engine()
    run(loop, requests(), close=False)
    forget_pages()
    loop.reset_prefix_cache()
    tokens, stats = run(loop, requests())
    assert tokens == expected
    assert stats.blocks_loaded == 0
    assert stats.loads_failed > 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(TWO_RANKS, id="tp", marks=pytest.mark.slow),
        pytest.param(PIPELINE, id="pp"),
        pytest.param(CONTEXTS, id="pcp", marks=pytest.mark.slow),
        pytest.param({**PIPELINE, **TWO_RANKS}, id="tp x pp", marks=pytest.mark.slow),
    ],
)
def test_each_rank_keeps_its_part_of_a_page(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that one rank has lost is computed by all."""
    from octavo.features.shelf.worker import PAGES

    ranks_in_threads(monkeypatch)
    config = LLAMA | {"vocab_size": VOCAB + 1}
    few = {"async_scheduling": True, "max_num_batched_tokens": 24}
    expected = plain(config, **few, device="cpu")
    loop = engine(config, **few, **settings)
    assert run(loop, requests(), close=False)[0] == expected
    loop.reset_prefix_cache()
    tokens, stats = run(loop, requests(), close=False)
    assert tokens == expected
    assert stats.blocks_loaded > 0
    assert stats.loads_failed == 0
    for page in [page for page in PAGES if page[0] == 0]:
        del PAGES[page]
    loop.reset_prefix_cache()
    loaded = stats.blocks_loaded
    tokens, stats = run(loop, requests())
    assert tokens == expected
    assert stats.blocks_loaded == loaded
    assert stats.loads_failed > 0


@pytest.mark.slow
def test_transfers_reach_a_worker_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dictionary is in that process."""
    expected = plain()
    monkeypatch.setenv("PYTHONPATH", str(TOYS.parent), prepend=":")
    monkeypatch.setattr("octavo.build_worker.RankProcess", partial(in_tests, RankProcess))
    loop = engine(distributed_executor_backend="mp", async_scheduling=True)
    assert run(loop, requests(), close=False)[0] == expected
    loop.reset_prefix_cache()
    forget_pages()
    tokens, stats = run(loop, requests())
    assert tokens == expected
    assert stats.blocks_loaded > 0
    assert stats.loads_failed == 0

    loop = engine(distributed_executor_backend="mp")
    assert loop.call("shelf", "count", {"above": 0}).result(60) == {"of each rank": [0]}
    with pytest.raises(InvalidRequestError, match="above must be at least 0"):
        loop.call("shelf", "count", {"above": -1}).result(60)
    with pytest.raises(InvalidRequestError, match="'shelf' has no method 'sort'"):
        loop.worker.call_hook("shelf", "sort", {}).result(60)
    loop.close()


def test_calls_reach_the_worker_half() -> None:
    loop = engine(enable_sleep_mode=True)
    _, stats = run(loop, requests(), close=False)
    assert loop.call("shelf", "count", {"above": 0}).result(60) == {"of each rank": [stats.blocks_stored]}
    assert loop.call("shelf", "count", {"above": 1 << 40}).result(60) == {"of each rank": [0]}
    with pytest.raises(InvalidRequestError, match="above must be at least 0"):
        loop.call("shelf", "count", {"above": -1}).result(60)
    with pytest.raises(UnsupportedError, match="does not have the feature 'tally'"):
        loop.worker.call_hook("tally", "count", {}).result(60)
    loop.pause(PauseMode.KEEP)
    loop.sleep(1)
    with pytest.raises(EngineStateError, match="The engine sleeps"):
        loop.call("shelf", "count", {"above": 0}).result(60)
    loop.close()


def in_tests(make: type[RankProcess], module: str, *args: Any, **kwargs: Any) -> RankProcess:
    assert module == "octavo.rank_main"
    return make("shelf_kit", *args, **kwargs)


def test_a_record_is_computed_again_with_its_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier that the replay begins with is empty, as it was; where it was not, the replay says so."""
    monkeypatch.setattr("octavo.replay.model_files", lambda config: model_files())
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    loop = engine(record_steps=str(whole), async_scheduling=True)
    run(loop, requests(), close=False)
    loop.reset_prefix_cache()
    _, stats = run(loop, requests())
    assert stats.blocks_loaded > 0
    run(engine(record_steps=str(rest)), requests())
    clear()
    report = octavo.replay.replay(whole)
    assert report.difference is None
    assert report.tokens == stats.generation_tokens
    clear()
    with pytest.raises(ConfigError, match="goes on from KV blocks that a tier held in the recorded run"):
        octavo.replay.replay(rest)


def test_where_the_state_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's runner, in Triton's interpreter without one."""
    pytest.importorskip("triton")
    small = {"memory_bytes": 1 << 20, "max_num_seqs": 2, "max_num_batched_tokens": 32, **behind(monkeypatch)}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id="a", tokens=list(range(4, 40)), params=params)]
    loop = engine(QWEN3, **small)
    expected, _ = run(loop, asked, close=False)
    loop.reset_prefix_cache()
    tokens, stats = run(loop, asked)
    assert tokens == expected
    assert stats.blocks_loaded == 2
