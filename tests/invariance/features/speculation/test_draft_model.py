"""A model that drafts changes no token, no report and no end; and one equal to the target is always right, so its
cache holds what it must."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chi_square import chi_square
from draft_models import NEAR, folder_of
from toy_drafter import News, check_same, news_of
from toy_engine import device_of, drive, one_by_one, strict, tiny_config
from toy_models import LATENT, LATENT_BYTES_PER_TOKEN, LLAMA, LLAMA_KV_BYTES_PER_TOKEN, VOCAB, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.pausing import SleepTag
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.5, "top_k": 3, "seed": 1, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}, "logprobs": 2},
    {"temperature": 0.4, "seed": 4, "logprobs": 3, "presence_penalty": 0.4, "min_tokens": 9},
    {"temperature": 0, "prompt_logprobs": 2, "bad_token_ids": [[11], [40, 41]], "logprobs": 1},
    {"temperature": 0.3, "min_p": 0.05, "seed": 9, "stop_token_ids": [17, 30, 80, 101, 111, 120]},
]
FEATURES: dict[str, dict[str, Any]] = {
    "": {},
    "overlap": {"async_scheduling": True},
    "depth 2": {"depth": 2},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "preemption": {"num_blocks": 9, "max_model_len": 128},
    "preemption + depth 2": {"num_blocks": 9, "max_model_len": 128, "depth": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "torch attention": {"attention_backend": "torch"},
    "torch attention + chunked prefill": {
        "attention_backend": "torch",
        "max_num_batched_tokens": 24,
        "max_num_seqs": 6,
    },
}
WINDOWED = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 1,
}
CACHES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "windows in some layers": (WINDOWED, WINDOWED, {}),
    "windows in all layers": (WINDOWED | {"max_window_layers": 0}, WINDOWED | {"max_window_layers": 0}, {}),
    "windows in all layers, none in the drafting model": (WINDOWED | {"max_window_layers": 0}, NEAR, {}),
    "latents": (LATENT, LATENT, {}),
    "latents, none in the drafting model": (LATENT, NEAR, {}),
    "integers": (LLAMA, LLAMA, {"kv_cache_dtype": "int8"}),
    "torch": (WINDOWED, WINDOWED, {"attention_backend": "torch", "depth": 2}),
}


def some(ways: dict[str, Any]) -> list[Any]:
    """The settings to test; those that run in torch are marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if "torch" in name else name for name in ways]


@cache
def requests() -> list[GenerateRequest]:
    """Prompts with common beginnings."""
    rng = random.Random(5)
    prefixes = [[rng.randrange(4, VOCAB) for _ in range(n)] for n in (48, 17)]
    made = []
    for i in range(12):
        prompt = rng.choice([*prefixes, []]) + [rng.randrange(4, VOCAB) for _ in range(rng.randrange(1, 40))]
        params = SamplingParams(max_tokens=rng.randrange(8, 60), **SAMPLED[i % len(SAMPLED)])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=i % 2))
    return made


def endless(count: int = 6) -> list[GenerateRequest]:
    """Requests that end by their length only, so that no accepted draft is cut off."""
    made = requests()[:count]
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}]
    return [
        GenerateRequest(
            id=one.id, tokens=one.tokens, params=SamplingParams(max_tokens=30, ignore_eos=True, **ways[i % 2])
        )
        for i, one in enumerate(made)
    ]


def engine(config: dict[str, Any] = LLAMA, **settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(**settings), model_files(config))[0]
    return strict(loop)


def drafting(model: dict[str, Any], folder: Path, count: int = 4, *, adaptive: bool = False) -> dict[str, Any]:
    own = {"method": "draft_model", "model": folder_of(model, folder / "drafting"), "num_speculative_tokens": count}
    return {"speculative_config": own | {"adaptive": adaptive}}


@cache
def truth(device: str) -> News:
    plain = {"attention_backend": "reference", "enable_prefix_caching": False, "async_scheduling": False}
    loop = engine(**plain, device=device)
    alone = news_of(list(one_by_one(loop, requests())))
    loop.close()
    return alone


def metric(loop: EngineLoop, name: str) -> float:
    found = {one.name: one.values for one in loop.stats().features}
    return sum(found[f"spec_decode_{name}"].values())


@pytest.mark.parametrize("name", some(FEATURES))
def test_a_model_that_drafts_changes_nothing(name: str, tmp_path: Path) -> None:
    settings = FEATURES[name]
    loop = engine(**settings, **drafting(NEAR, tmp_path))
    check_same(news_of(list(drive(loop, requests()))), truth(device_of(settings)))
    drafts, accepted = metric(loop, "num_draft_tokens"), metric(loop, "num_accepted_tokens")
    assert accepted > 20
    assert drafts - accepted > 20
    if "preemption" in name:
        assert loop.stats().num_preemptions > 0
    loop.close()


@pytest.mark.parametrize("name", some(FEATURES))
def test_a_twin_is_always_right(name: str, tmp_path: Path) -> None:
    """Whatever it lacked in its cache would make some of its drafts wrong."""
    loop = engine(**FEATURES[name], **drafting(LLAMA, tmp_path))
    news = news_of(list(drive(loop, endless())))
    assert sum(len(tokens) for tokens, *_ in news.values()) == 9 * 30
    drafts = metric(loop, "num_draft_tokens")
    assert drafts > 150
    assert metric(loop, "num_accepted_tokens") == drafts
    loop.close()


@pytest.mark.parametrize("name", some(CACHES))
def test_kinds_of_caches(name: str, tmp_path: Path) -> None:
    model, drafter, settings = CACHES[name]
    settings = settings | {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 48}

    def run(**more: Any) -> tuple[News, EngineLoop]:
        loop = engine(model, **settings, **more)
        return news_of(list(drive(loop, endless()))), loop

    expected, plain = run()
    found, loop = run(**drafting(drafter, tmp_path))
    check_same(found, expected)
    drafts = metric(loop, "num_draft_tokens")
    assert drafts > 100
    if model is drafter:
        assert metric(loop, "num_accepted_tokens") == drafts
    plain.close()
    loop.close()


def test_memory_for_both_models(tmp_path: Path) -> None:
    """A block has room for both, so fewer blocks fit."""
    for model, size in ((LLAMA, LLAMA_KV_BYTES_PER_TOKEN), (LATENT, LATENT_BYTES_PER_TOKEN)):
        _, info = build_core(tiny_config(memory_bytes=1 << 20), model_files(model))
        config = tiny_config(memory_bytes=1 << 20, **drafting(NEAR, tmp_path))
        loop, both = build_core(config, model_files(model))
        assert info.num_blocks == (1 << 20) // (16 * size)
        assert both.num_blocks == (1 << 20) // (16 * (size + LLAMA_KV_BYTES_PER_TOKEN // 2))
        assert both.memory["kv_cache"] <= 1 << 20
        loop.close()


def test_a_shorter_context_of_the_drafting_model_ends_its_drafts(tmp_path: Path) -> None:
    asked = [GenerateRequest(id="r", tokens=[5, 6, 7], params=SamplingParams(max_tokens=60, temperature=0))]
    plain, loop = engine(), engine(**drafting(LLAMA | {"max_position_embeddings": 32}, tmp_path))
    long = GenerateRequest(id="long", tokens=list(range(4, 60)), params=SamplingParams(max_tokens=9, temperature=0))
    expected = news_of(list(drive(plain, [*asked, long])))
    check_same(news_of(list(drive(loop, [*asked, long]))), expected)
    assert 10 < metric(loop, "num_accepted_tokens") < 32
    plain.close()
    loop.close()


def test_a_sleeping_engine_drafts_again(tmp_path: Path) -> None:
    loop = engine(enable_sleep_mode=True, **drafting(LLAMA, tmp_path))
    expected = news_of(list(drive(loop, endless(2))))
    loop.sleep(1)
    loop.wake_up(list(SleepTag))
    before = metric(loop, "num_draft_tokens")
    check_same(news_of(list(drive(loop, endless(2)))), expected)
    assert metric(loop, "num_accepted_tokens") == metric(loop, "num_draft_tokens") > before
    loop.close()


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 99 tokens, and 'tiny' 131\..*same vocabulary"):
        engine(**drafting(LLAMA | {"vocab_size": 99}, tmp_path))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"makes vectors, not text\. Name a model that generates text"):
        engine(**drafting(LLAMA | {"architectures": ["BertModel"], "model_type": "bert"}, tmp_path))


# The distribution of what is drawn

SMALL = LLAMA | {"vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
LENGTH, TOP, PROMPT = 3, 5, [5, 9, 2]
WARM: dict[str, Any] = {"temperature": 0.4, "top_k": TOP, "ignore_eos": True}


def small(**more: Any) -> EngineLoop:
    settings = {"memory_bytes": 1 << 22, "logprobs_mode": "processed_logprobs", "max_num_seqs": 128} | more
    return engine(SMALL, **settings)


def chances_of_outputs() -> dict[tuple[int, ...], float]:
    """The probability of each output of LENGTH tokens, from the engine's own report of what it draws from."""
    known = {(): 1.0}
    loop = small()
    for length in range(LENGTH):
        params = SamplingParams(max_tokens=1, seed=0, logprobs=TOP, **WARM)
        begun = {",".join(map(str, one)): one for one in known if len(one) == length}
        asked = [
            GenerateRequest(id=f"p{name}", tokens=PROMPT + list(one), params=params) for name, one in begun.items()
        ]
        for (name, _), (_, logprobs, *_) in news_of(list(drive(loop, asked, at_once=64))).items():
            one, entry = begun[name[1:]], logprobs[0]
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                known[(*one, token)] = known[one] * math.exp(logprob)
    loop.close()
    return {one: chance for one, chance in known.items() if len(one) == LENGTH}


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_drawn_tokens_follow_the_target(count: int, tmp_path: Path) -> None:
    """Drafts are drawn from the distributions of a model that is often right."""
    chances = chances_of_outputs()
    loop = small(**drafting(SMALL | {"num_hidden_layers": 1}, tmp_path, 3))
    asked = [
        GenerateRequest(id=str(i), tokens=PROMPT, params=SamplingParams(max_tokens=LENGTH, seed=i, **WARM))
        for i in range(count)
    ]
    drawn = Counter(tuple(tokens) for tokens, *_ in news_of(list(drive(loop, asked, at_once=128))).values())
    drafts, accepted = metric(loop, "num_draft_tokens"), metric(loop, "num_accepted_tokens")
    assert drafts / 10 < accepted < 0.95 * drafts
    outcomes = sorted(chances.keys() | drawn.keys())
    statistic = chi_square([drawn[one] for one in outcomes], [count * chances.get(one, 0.0) for one in outcomes])
    freedom = len(outcomes) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
    loop.close()
