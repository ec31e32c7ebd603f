"""Drafts by lookup change no token, no report and no end, under pairs of other settings."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import msgspec
import pytest
from toy_drafter import News, check_same, news_of
from toy_engine import device_of, drive, one_by_one, strict, tiny_config
from toy_models import LLAMA, LLAMA_KV_BYTES_PER_TOKEN, VOCAB, model_files

from octavo.build import build_core
from octavo.core.output import FinishReason
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.engine.loop import EngineLoop
from octavo.features.speculation.payload import NAME, SpeculationOption

FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {"async_scheduling": True},
    "depth 2": {"depth": 2},
    "chunked prefill": {"max_num_batched_tokens": 24, "max_num_seqs": 6},
    "preemption": {"memory_bytes": 144 * LLAMA_KV_BYTES_PER_TOKEN, "max_model_len": 128},
    "no prefix cache": {"enable_prefix_caching": False},
    "torch attention": {"attention_backend": "torch"},
}
CONFLICT = {"overlap", "depth 2"}
PAIRS = [(), *((name,) for name in FEATURES), *(p for p in itertools.combinations(FEATURES, 2) if set(p) != CONFLICT)]
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.5, "top_k": 3, "seed": 1, "n": 2},
    {"temperature": 0, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}, "logprobs": 2},
    {"temperature": 0.4, "seed": 4, "logprobs": 3, "presence_penalty": 0.4, "min_tokens": 9},
    {"temperature": 0, "prompt_logprobs": 2, "bad_token_ids": [[11], [40, 41]], "logprobs": 1},
    {"temperature": 0.3, "min_p": 0.05, "seed": 9, "stop_token_ids": [17, 30, 80, 101, 111, 120]},
]
FIXED = {"adaptive": False, "prompt_lookup_min": 1, "num_speculative_tokens": 5}


@cache
def requests(device: str, *, guided: bool = False) -> list[GenerateRequest]:
    """Prompts that repeat themselves; every third request has a prediction, mostly right."""
    rng = random.Random(5)
    made = []
    for i in range(12):
        phrase = [rng.randrange(4, VOCAB) for _ in range(rng.randrange(2, 9))]
        prompt = phrase * rng.randrange(2, 6) + phrase[: rng.randrange(1, 2 + len(phrase) // 2)]
        params = SamplingParams(max_tokens=rng.randrange(8, 60), **SAMPLED[i % len(SAMPLED)])
        made.append(GenerateRequest(id=f"r{i}", tokens=prompt, params=params, priority=i % 2))
    if not guided:
        return made
    return [_with_option(one, i, truth(device)[one.id, 0][0]) for i, one in enumerate(made)]


def _with_option(request: GenerateRequest, number: int, output: list[int]) -> GenerateRequest:
    prediction = [t if i % 7 else 5 for i, t in enumerate(output, 1)] if number % 3 == 0 else []
    option = SpeculationOption(number % 5 != 4, len(request.tokens), prediction)
    return msgspec.structs.replace(request, options={NAME: msgspec.Raw(msgspec.msgpack.encode(option))})


def engine(**settings: Any) -> EngineLoop:
    loop = build_core(tiny_config(**settings), model_files(LLAMA))[0]
    return strict(loop)


@cache
def truth(device: str) -> News:
    plain = {"attention_backend": "reference", "enable_prefix_caching": False, "async_scheduling": False}
    loop = engine(**plain, device=device)
    alone = news_of(list(one_by_one(loop, requests(device))))
    loop.close()
    return alone


def metric(loop: EngineLoop, name: str) -> float:
    found = {one.name: one.values for one in loop.stats().features}
    return sum(found[f"spec_decode_{name}"].values())


@pytest.mark.parametrize("names", PAIRS, ids=lambda p: " + ".join(p))
def test_lookup_changes_nothing(names: tuple[str, ...]) -> None:
    settings: dict[str, Any] = {}
    for name in names:
        settings |= FEATURES[name]
    device = device_of(settings)
    method = "ngram" if device != "cpu" or len(names) < 2 else "suffix"
    loop = engine(speculative_config=FIXED | {"method": method}, **settings)
    check_same(news_of(list(drive(loop, requests(device, guided=True)))), truth(device))
    drafts, accepted = metric(loop, "num_draft_tokens"), metric(loop, "num_accepted_tokens")
    assert accepted > 20
    assert drafts - accepted > 20
    if "preemption" in names:
        assert loop.stats().num_preemptions > 0
    loop.close()


def test_the_adaptive_number_of_drafts_changes_nothing() -> None:
    device = device_of({})
    loop = engine(speculative_config={"method": "auto", "prompt_lookup_min": 1})
    check_same(news_of(list(drive(loop, requests(device, guided=True)))), truth(device))
    assert metric(loop, "num_drafts") > 0
    loop.close()


def test_the_truth_ends_in_all_ways() -> None:
    assert {finish for *_, finish in truth(device_of({})).values()} == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_request_without_drafts_has_none() -> None:
    option = msgspec.Raw(msgspec.msgpack.encode(SpeculationOption(enabled=False)))
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    loop = engine(speculative_config=FIXED)
    off = GenerateRequest(id="a", tokens=[5, 6, 7] * 6, params=params, options={NAME: option})
    before = news_of(list(drive(loop, [off])))["a", 0][0]
    assert not metric(loop, "num_drafts")
    on = GenerateRequest(id="b", tokens=[5, 6, 7] * 6, params=params)
    assert news_of(list(drive(loop, [on])))["b", 0][0] == before
    assert metric(loop, "num_drafts")
    loop.close()
